// Bytes that arrive piece by piece, given on as valid UTF-8 text as soon as each character is complete.
#pragma once

#include <string>
#include <string_view>

namespace pathattn {

// What no valid character can begin with or go on with becomes U+FFFD: one for each maximal start of a character (Unicode 15, section 3.9, "U+FFFD
// Substitution of Maximal Subparts"), so surrogates, overlong forms and values above U+10FFFF give one for each of their bytes. The pieces' sizes
// make no difference to the joined text.
class Utf8Stream {
 public:
  std::string feed(std::string_view bytes);  // the text completed by these bytes
  std::string finish();                      // U+FFFD if a character was left incomplete; ready for a new text

 private:
  std::string pending_;  // the start of a character, at most 3 bytes
};

}  // namespace pathattn
