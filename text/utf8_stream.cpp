#include "text/utf8_stream.h"

namespace pathattn {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Bytes of the character that starts with `lead`; 0 if none does.
size_t character_size(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead <= 0xF4 ? 4 : 0;
}

// Whether `next` may follow the start of a character. Only the second byte has ranges of its own: against overlong forms (E0, F0),
// surrogates (ED) and values above U+10FFFF (F4).
bool continues(std::string_view start, unsigned char next) {
  unsigned char low = 0x80, high = 0xBF;
  if (start.size() == 1) {
    switch (static_cast<unsigned char>(start[0])) {
      case 0xE0:
        low = 0xA0;
        break;
      case 0xED:
        high = 0x9F;
        break;
      case 0xF0:
        low = 0x90;
        break;
      case 0xF4:
        high = 0x8F;
        break;
    }
  }
  return low <= next && next <= high;
}

}  // namespace

std::string Utf8Stream::feed(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    if (!pending_.empty() && !continues(pending_, static_cast<unsigned char>(byte))) text += finish();
    if (pending_.empty() && character_size(static_cast<unsigned char>(byte)) == 0) {
      text += kReplacement;
      continue;
    }
    pending_ += byte;
    if (pending_.size() == character_size(static_cast<unsigned char>(pending_[0]))) {
      text += pending_;
      pending_.clear();
    }
  }
  return text;
}

std::string Utf8Stream::finish() {
  if (pending_.empty()) return "";
  pending_.clear();
  return std::string(kReplacement);
}

}  // namespace pathattn
