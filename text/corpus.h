// Text as bytes, from files, folders and patterns, split into training and validation by file. docs/data.md has the rules.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pathattn {

// Documents (files) one after the other, in an order that depends on their names alone.
class Corpus {
 public:
  void append(std::string name, std::string_view bytes);

  std::string_view bytes() const { return bytes_; }
  int64_t num_documents() const { return static_cast<int64_t>(names_.size()); }
  const std::string& name(int64_t document) const { return names_[document]; }
  std::string_view document(int64_t document) const;
  uint64_t hash() const;  // of names, sizes and bytes

 private:
  std::string bytes_;
  std::vector<std::string> names_;
  std::vector<size_t> ends_;
};

struct CorpusSource {
  // Each is a file, a folder (everything below it) or a pattern: * ? [a-z] within one name, ** for any number of folders. What starts with a dot is
  // found only where the pattern spells the dot, and links to folders are not followed.
  std::vector<std::string> files;
  std::vector<std::string> extensions;  // for folders and patterns: only names that end so (".py"); empty: all
  double validation_fraction = 0.05;    // expected share of the files, in [0, 1]
  uint64_t split_seed = 0;
};

struct SplitCorpus {
  Corpus training, validation;
};

// Reads everything once. A document's name is its path below the folder, or below the part of the pattern before the first wildcard; a file named
// itself has its file name. Whether it is for validation is a hash of that name and the seed, hence the same on every machine. With
// validation_fraction > 0 both sides get at least one of two or more files; a single file is cut, its last part being for validation. Files without
// bytes or with a NUL byte are left out.
// Error naming file or pattern: what does not exist, cannot be read, or (named itself) is empty or binary, and what leaves no text at all.
SplitCorpus read_corpus(const CorpusSource& source);

}  // namespace pathattn
