#include "bench/sizes.hpp"

#include <charconv>
#include <string>
#include <system_error>

#include <fmt/core.h>

namespace kvferry::bench {
namespace {

constexpr std::string_view suffixes = "KMGT";

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

/// The power of two that a suffix multiplies by, or -1 when it is none.
int shift_of(std::string_view suffix) {
  if (suffix.empty()) return 0;
  const auto place = suffixes.find(upper(suffix.front()));
  if (place == std::string_view::npos) return -1;
  std::string rest;
  for (const char c : suffix.substr(1)) rest += upper(c);
  if (!rest.empty() && rest != "B" && rest != "IB") return -1;
  return 10 * static_cast<int>(place + 1);
}

Status not_a_size(std::string_view text) {
  return {Errc::invalid_argument,
          fmt::format("'{}' is not a size: write a whole number, with K, M, G or T if you like (4K, 64K, 1M)", text)};
}

}  // namespace

Result<std::uint64_t> parse_size(std::string_view text) {
  const std::string_view trimmed = trim(text);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(trimmed.data(), trimmed.data() + trimmed.size(), number);
  if (error != std::errc()) return not_a_size(text);
  const int shift = shift_of(trimmed.substr(static_cast<std::size_t>(end - trimmed.data())));
  if (shift < 0) return not_a_size(text);
  if (shift > 0 && number > (UINT64_MAX >> shift)) {
    return Status(Errc::too_large, fmt::format("'{}' is beyond 64 bits", text));
  }
  return number << shift;
}

Result<std::vector<std::uint64_t>> parse_size_list(std::string_view text) {
  std::vector<std::uint64_t> sizes;
  for (const std::string& part : split_list(text)) {
    auto size = parse_size(part);
    if (!size) return size.status();
    sizes.push_back(*size);
  }
  return sizes;
}

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> parts;
  for (;;) {
    const auto comma = text.find(',');
    parts.emplace_back(trim(text.substr(0, comma)));
    if (comma == std::string_view::npos) return parts;
    text.remove_prefix(comma + 1);
  }
}

std::string format_size(std::uint64_t bytes) {
  int step = 0;
  while (step < static_cast<int>(suffixes.size()) && bytes != 0 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++step;
  }
  return step == 0 ? std::to_string(bytes) : std::to_string(bytes) + suffixes[static_cast<std::size_t>(step - 1)];
}

}  // namespace kvferry::bench
