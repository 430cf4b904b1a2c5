#include "text/file_search.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "base/error_of.h"
#include "base/scratch_folder.h"

namespace pathattn {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

class FileSearch : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"b.py", "a.py", "notes.txt", "sub/a.py", "sub/deep/c.py", "sub/deep/d.md", ".hidden/e.py", "sub/.f.py", "sub2/sub/g.py"}) {
      folder.write(name, name);
    }
  }

  Names names(const std::string& what, const Names& extensions = {}) const {
    Names found;
    for (const FoundFile& file : find_files(folder / what, extensions)) {
      EXPECT_TRUE(fs::is_regular_file(file.path));
      EXPECT_FALSE(file.named_itself);
      found.push_back(file.name);
    }
    return found;
  }

  std::string error(const std::string& what, const Names& extensions = {}) const {
    return error_of([&] { find_files(what, extensions); });
  }

  ScratchFolder folder;
};

TEST_F(FileSearch, file) {
  const std::vector<FoundFile> files = find_files(folder / "sub/a.py", {".md"});
  ASSERT_EQ(files.size(), 1u);
  EXPECT_EQ(files[0].name, "a.py");
  EXPECT_TRUE(files[0].named_itself);
}

TEST_F(FileSearch, folder_is_searched_below_in_order_without_hidden_files) {
  EXPECT_EQ(names(""), (Names{"a.py", "b.py", "notes.txt", "sub/a.py", "sub/deep/c.py", "sub/deep/d.md", "sub2/sub/g.py"}));
  EXPECT_EQ(names("sub"), (Names{"a.py", "deep/c.py", "deep/d.md"}));
  EXPECT_EQ(names("sub/", {".md", ".txt"}), Names{"deep/d.md"});
  EXPECT_EQ(names(".hidden"), Names{"e.py"});
}

TEST_F(FileSearch, patterns) {
  EXPECT_EQ(names("*.py"), (Names{"a.py", "b.py"}));
  EXPECT_EQ(names("[b-z].p?"), Names{"b.py"});
  EXPECT_EQ(names("**/*.py"), (Names{"a.py", "b.py", "sub/a.py", "sub/deep/c.py", "sub2/sub/g.py"}));
  EXPECT_EQ(names("**"), names(""));
  EXPECT_EQ(names("**/**/*.md"), Names{"sub/deep/d.md"});
  EXPECT_EQ(names("**/sub/**"), (Names{"sub/a.py", "sub/deep/c.py", "sub/deep/d.md", "sub2/sub/g.py"}));
  EXPECT_EQ(names("s*/*.py"), Names{"sub/a.py"});
  EXPECT_EQ(names("sub*/*/*", {".py"}), (Names{"sub/deep/c.py", "sub2/sub/g.py"}));
  EXPECT_EQ(names(".h*/*"), Names{".hidden/e.py"});
  EXPECT_EQ(names("sub/.*"), Names{".f.py"});
  folder.write("odd[1].py", "x");
  EXPECT_TRUE(find_files(folder / "odd[1].py", {})[0].named_itself);  // a file of just that name comes before the pattern
}

TEST_F(FileSearch, links) {
  fs::create_directory_symlink("..", folder / "sub/loop");
  fs::create_symlink("nowhere", folder / "sub/broken.py");
  fs::create_symlink("../b.py", folder / "sub/link.py");
  EXPECT_EQ(names("sub"), (Names{"a.py", "deep/c.py", "deep/d.md", "link.py"}));
}

TEST_F(FileSearch, errors_name_what_was_asked_for) {
  EXPECT_EQ(error(folder / "missing"), (folder / "missing") + ": No such file or directory");
  EXPECT_EQ(error(folder / "*.cpp"), fmt::format("no file matches {}", folder / "*.cpp"));
  EXPECT_NE(error(folder / "missing/*.py").find("there is no folder " + (folder / "missing")), std::string::npos);
  EXPECT_NE(error(folder / "sub", {".rs"}).find(folder / "sub"), std::string::npos);
  EXPECT_NE(error(folder / "notes.txt/*").find("notes.txt"), std::string::npos);
  EXPECT_NE(error("/dev/null").find("neither a file nor a folder"), std::string::npos);
  EXPECT_NE(error(""), "");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_NE(error(folder / "pip*"), "");  // not opened: that would wait for a writer
}

}  // namespace
}  // namespace pathattn
