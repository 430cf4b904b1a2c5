#include "text/corpus.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "text/file_search.h"

namespace pathattn {
namespace {

struct Document {
  std::string name, bytes;
  uint64_t hash;  // of the name; decides the split
};

// The texts of one file, folder or pattern. seen: paths already read, so that a file reached twice counts once.
void read_documents(const std::string& what, const CorpusSource& source, std::set<std::string>& seen, std::vector<Document>& documents) {
  int64_t num_empty = 0, num_binary = 0, num_text = 0;
  for (const FoundFile& file : find_files(what, source.extensions)) {
    if (!seen.insert(std::filesystem::canonical(file.path).string()).second) {
      ++num_text;
      continue;
    }
    std::string bytes = read_file(file.path);
    const size_t nul = bytes.find('\0');
    if (file.named_itself && bytes.empty()) fail("{} is empty: there is no text to read", what);
    if (file.named_itself && nul != std::string::npos) fail("{} is binary (its byte {} is NUL), not text", what, nul);
    num_empty += bytes.empty();
    num_binary += nul != std::string::npos;
    if (bytes.empty() || nul != std::string::npos) continue;
    ++num_text;
    documents.push_back({file.name, std::move(bytes), hash_bytes(file.name, source.split_seed)});
  }
  if (num_text == 0) fail("{} gives no text: {} files are empty and {} are binary (have NUL bytes)", what, num_empty, num_binary);
}

// Which documents are for validation: those whose hash is in the lowest share, but not none and not all of several.
std::vector<bool> choose_validation(const std::vector<Document>& documents, double fraction) {
  const size_t count = documents.size();
  std::vector<bool> validation(count);
  for (size_t i = 0; i < count; ++i) validation[i] = static_cast<double>(documents[i].hash >> 11) * 0x1p-53 < fraction;
  if (count < 2 || fraction == 0) return std::vector<bool>(count);
  const auto [lowest, highest] =
      std::minmax_element(documents.begin(), documents.end(), [](const Document& left, const Document& right) { return left.hash < right.hash; });
  validation[lowest - documents.begin()] = true;
  validation[highest - documents.begin()] = false;
  return validation;
}

}  // namespace

void Corpus::append(std::string name, std::string_view bytes) {
  names_.push_back(std::move(name));
  bytes_.append(bytes);
  ends_.push_back(bytes_.size());
}

std::string_view Corpus::document(int64_t document) const {
  const size_t begin = document == 0 ? 0 : ends_[document - 1];
  return bytes().substr(begin, ends_[document] - begin);
}

uint64_t Corpus::hash() const {
  uint64_t hash = 0;
  for (int64_t i = 0; i < num_documents(); ++i) hash = hash_bytes(document(i), hash_bytes(name(i), hash));
  return hash;
}

SplitCorpus read_corpus(const CorpusSource& source) {
  if (source.files.empty()) fail("there is no text to read: name at least one file, folder or pattern");
  std::vector<Document> documents;
  std::set<std::string> seen;
  for (const std::string& what : source.files) read_documents(what, source, seen, documents);
  std::stable_sort(documents.begin(), documents.end(), [](const Document& left, const Document& right) { return left.name < right.name; });

  const std::vector<bool> validation = choose_validation(documents, source.validation_fraction);
  SplitCorpus corpus;
  for (size_t i = 0; i < documents.size(); ++i) {
    std::string_view training_part = documents[i].bytes, validation_part;
    if (documents.size() == 1) {
      const auto size = static_cast<size_t>(source.validation_fraction * static_cast<double>(training_part.size()));
      validation_part = training_part.substr(training_part.size() - size);
      training_part.remove_suffix(size);
    } else if (validation[i]) {
      std::swap(training_part, validation_part);
    }
    if (!training_part.empty()) corpus.training.append(documents[i].name, training_part);
    if (!validation_part.empty()) corpus.validation.append(documents[i].name, validation_part);
    documents[i].bytes = {};
  }
  return corpus;
}

}  // namespace pathattn
