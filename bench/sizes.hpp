// Sizes and counts as people write them: "4K", "1M", "160", and lists of these.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/runtime/status.hpp>

namespace kvferry::bench {

/// Reads a whole number with an optional suffix K, M, G or T (powers of 1024; "KiB", "kb" and the
/// like mean the same). Refuses signs, fractions, anything after the suffix, and overflow.
Result<std::uint64_t> parse_size(std::string_view text);

/// Reads "4K,64K,1M". Refuses an empty list and an empty element.
Result<std::vector<std::uint64_t>> parse_size_list(std::string_view text);

/// The parts of a comma-separated list, spaces around them removed; empty parts stay.
std::vector<std::string> split_list(std::string_view text);

/// "64K", "1M", "1000": with a suffix only where nothing is lost.
std::string format_size(std::uint64_t bytes);

}  // namespace kvferry::bench
