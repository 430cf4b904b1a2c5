#include "text/corpus.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/error_of.h"
#include "base/scratch_folder.h"

namespace pathattn {
namespace {

namespace fs = std::filesystem;

std::string error_of(const CorpusSource& source) {
  return pathattn::error_of([&] { read_corpus(source); });
}

std::vector<std::string> names(const Corpus& corpus) {
  std::vector<std::string> found;
  for (int64_t i = 0; i < corpus.num_documents(); ++i) found.push_back(corpus.name(i));
  return found;
}

std::string numbered(int i) { return fmt::format("f{:03}.txt", i); }

TEST(Corpus, documents_lie_one_after_the_other_by_name) {
  const ScratchFolder folder;
  folder.write("sub/c.txt", "three");
  folder.write("b.txt", "two\xff");
  folder.write("a.txt", "one");
  const Corpus corpus = read_corpus({{folder / ""}, {}, 0}).training;
  EXPECT_EQ(corpus.bytes(), "onetwo\xffthree");
  ASSERT_EQ(names(corpus), (std::vector<std::string>{"a.txt", "b.txt", "sub/c.txt"}));
  EXPECT_EQ(corpus.document(0), "one");
  EXPECT_EQ(corpus.document(2), "three");
}

TEST(Corpus, order_and_split_do_not_depend_on_where_the_folder_lies) {
  const ScratchFolder folder;
  for (int i = 0; i < 60; ++i) {
    folder.write("here/x/" + numbered(i), numbered(i));
    folder.write("there/below/x/" + numbered(59 - i), numbered(59 - i));
  }
  const SplitCorpus here = read_corpus({{folder / "here"}, {}, 0.2}), there = read_corpus({{folder / "there/below/**/*.txt"}, {}, 0.2});
  EXPECT_EQ(here.training.bytes(), there.training.bytes());
  EXPECT_EQ(here.validation.bytes(), there.validation.bytes());
  EXPECT_EQ(here.training.hash(), there.training.hash());
  EXPECT_EQ(names(here.validation), names(there.validation));
}

TEST(Corpus, split_is_by_file_seeded_and_of_the_stated_share) {
  const ScratchFolder folder;
  for (int i = 0; i < 400; ++i) folder.write(numbered(i), numbered(i));
  for (const double fraction : {0.05, 0.3}) {
    const SplitCorpus corpus = read_corpus({{folder / ""}, {}, fraction});
    EXPECT_EQ(corpus.training.num_documents() + corpus.validation.num_documents(), 400);
    EXPECT_NEAR(corpus.validation.num_documents(), 400 * fraction, 4 * std::sqrt(400 * fraction * (1 - fraction)));
    std::vector<std::string> all = names(corpus.training), validation = names(corpus.validation);
    all.insert(all.end(), validation.begin(), validation.end());
    std::sort(all.begin(), all.end());
    EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
  }
  EXPECT_NE(read_corpus({{folder / ""}, {}, 0.05, 0}).validation.hash(), read_corpus({{folder / ""}, {}, 0.05, 1}).validation.hash());
  EXPECT_EQ(read_corpus({{folder / ""}, {}, 0}).validation.num_documents(), 0);
  // Recorded once: the same files everywhere.
  EXPECT_EQ(read_corpus({{folder / ""}, {}, 0.05}).validation.name(0), "f027.txt");
}

TEST(Corpus, neither_side_is_empty_with_two_files) {
  const ScratchFolder folder;
  folder.write("a", "a");
  folder.write("b", "b");
  for (const double fraction : {1e-9, 0.5, 1.0}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const SplitCorpus corpus = read_corpus({{folder / ""}, {}, fraction, seed});
      EXPECT_EQ(corpus.training.num_documents(), 1);
      EXPECT_EQ(corpus.validation.num_documents(), 1);
    }
  }
}

TEST(Corpus, single_file_is_cut) {
  const ScratchFolder folder;
  folder.write("a", "0123456789");
  const SplitCorpus corpus = read_corpus({{folder / "a"}, {}, 0.25});
  EXPECT_EQ(corpus.training.bytes(), "01234567");
  EXPECT_EQ(corpus.validation.bytes(), "89");
  EXPECT_EQ(read_corpus({{folder / "a"}, {}, 0.05}).validation.num_documents(), 0);  // less than a byte
}

TEST(Corpus, empty_and_binary_files_are_skipped_or_refused) {
  const ScratchFolder folder;
  folder.write("mixed/text", "text");
  folder.write("mixed/empty", "");
  folder.write("mixed/binary", std::string(5000, 'x') + '\0');
  folder.write("none/empty", "");
  folder.write("none/binary", std::string("\0", 1));
  EXPECT_EQ(read_corpus({{folder / "mixed"}, {}, 0}).training.bytes(), "text");
  EXPECT_EQ(error_of({{folder / "none"}, {}, 0}), (folder / "none") + " gives no text: 1 files are empty and 1 are binary (have NUL bytes)");
  EXPECT_NE(error_of({{folder / "mixed", folder / "none/*"}, {}, 0}).find(folder / "none/*"), std::string::npos);
  EXPECT_NE(error_of({{folder / "mixed/empty"}, {}, 0}).find((folder / "mixed/empty") + " is empty"), std::string::npos);
  EXPECT_NE(error_of({{folder / "mixed/binary"}, {}, 0}).find("(its byte 5000 is NUL)"), std::string::npos);
}

TEST(Corpus, unreadable_and_missing_files_are_named) {
  const ScratchFolder folder;
  folder.write("text", "text");
  EXPECT_NE(error_of({{folder / "text", folder / "missing"}, {}, 0}).find(folder / "missing"), std::string::npos);
  EXPECT_NE(error_of({}), "");
  fs::permissions(folder / "text", fs::perms::none);
  const bool root = ::geteuid() == 0;  // who may read everything
  if (root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  EXPECT_NE(error_of({{folder / ""}, {}, 0}).find((folder / "text") + ": Permission denied"), std::string::npos);
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
}

TEST(Corpus, file_reached_twice_counts_once) {
  const ScratchFolder folder;
  folder.write("sub/a", "a");
  folder.write("sub/b", "b");
  fs::create_symlink("a", folder / "sub/link");
  const SplitCorpus corpus = read_corpus({{folder / "sub/b", folder / "sub", folder / "**"}, {}, 0});
  EXPECT_EQ(corpus.training.bytes(), "ab");
}

TEST(Corpus, hash_sees_bytes_names_and_boundaries) {
  const auto hash = [](const std::vector<std::pair<std::string, std::string>>& documents) {
    Corpus corpus;
    for (const auto& [name, bytes] : documents) corpus.append(name, bytes);
    return corpus.hash();
  };
  const uint64_t base = hash({{"a", "one"}, {"b", "two"}});
  EXPECT_EQ(base, hash({{"a", "one"}, {"b", "two"}}));
  EXPECT_NE(base, hash({{"a", "one"}, {"b", "twO"}}));
  EXPECT_NE(base, hash({{"a", "one"}, {"c", "two"}}));
  EXPECT_NE(base, hash({{"a", "onet"}, {"b", "wo"}}));
  EXPECT_NE(base, hash({{"b", "two"}, {"a", "one"}}));
}

}  // namespace
}  // namespace pathattn
