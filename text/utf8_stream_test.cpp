#include "text/utf8_stream.h"

#include <gtest/gtest.h>

#include <vector>

namespace pathattn {
namespace {

const std::string kR = "\xEF\xBF\xBD";  // U+FFFD

std::string whole(const std::string& bytes, size_t piece) {
  Utf8Stream stream;
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += piece) text += stream.feed(std::string_view(bytes).substr(i, piece));
  return text + stream.finish();
}

TEST(Utf8Stream, S08_character_appears_once_complete) {
  Utf8Stream stream;
  EXPECT_EQ(stream.feed("\xf0"), "");
  EXPECT_EQ(stream.feed("\x9f"), "");
  EXPECT_EQ(stream.feed("\x98"), "");
  EXPECT_EQ(stream.feed("\x80"), "\xf0\x9f\x98\x80");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(stream.feed("\xf0\x9f"), "");
  EXPECT_EQ(stream.feed("\x98\x80"), "\xf0\x9f\x98\x80");
}

TEST(Utf8Stream, S08_invalid_bytes) {
  const struct {
    std::string bytes, text;
  } cases[] = {
      {"\xf0\x9f", kR},
      {"\xf0\x9f\x41", kR + "A"},
      {"\xc3\x28", kR + "("},
      {"\xed\xa0\x80", kR + kR + kR},
      {"\xff", kR},
      {"\xe6\xad", kR},
      {"\xc0\x80", kR + kR},
      {"\xe0\x80\x80", kR + kR + kR},
      {"\xf4\x90\x80\x80", kR + kR + kR + kR},
      {"\x80", kR},
      {"", ""},
      {"a\xf0\x9f\xe6\xad\xa3z", "a" + kR + "\xe6\xad\xa3z"},
      {"\xc3\xa9\xe2\x82\xac", "\xc3\xa9\xe2\x82\xac"},
      {std::string("\0", 1), std::string("\0", 1)},
      {"\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80", "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80"},
  };
  for (const auto& [bytes, text] : cases) {
    for (size_t piece = 1; piece <= 5; ++piece) EXPECT_EQ(whole(bytes, piece), text) << testing::PrintToString(bytes) << " by " << piece;
  }
}

TEST(Utf8Stream, every_code_point_passes_and_finish_starts_anew) {
  Utf8Stream stream;
  for (uint32_t code = 0; code <= 0x10FFFF; ++code) {
    if (code >= 0xD800 && code <= 0xDFFF) continue;
    std::string bytes;
    if (code < 0x80) {
      bytes.assign(1, static_cast<char>(code));
    } else if (code < 0x800) {
      bytes = {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
    } else if (code < 0x10000) {
      bytes = {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    } else {
      bytes = {static_cast<char>(0xF0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 63)), static_cast<char>(0x80 | (code >> 6 & 63)),
               static_cast<char>(0x80 | (code & 63))};
    }
    ASSERT_EQ(stream.feed(bytes), bytes) << code;
  }
  EXPECT_EQ(stream.feed("\xe6\xad"), "");
  EXPECT_EQ(stream.finish(), kR);
  EXPECT_EQ(stream.feed("a"), "a");
}

}  // namespace
}  // namespace pathattn
