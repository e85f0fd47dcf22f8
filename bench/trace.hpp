// Recorded requests: a file of JSON lines.
#pragma once

#include <cstdint>
#include <istream>
#include <optional>
#include <string>
#include <vector>

#include <kvferry/runtime/status.hpp>

namespace kvferry::bench {

/// Tokens that one entry of hash_ids stands for; the last one of a request may stand for fewer.
inline constexpr std::uint32_t hash_tokens = 512;

struct TraceRequest {
  double timestamp_ms = 0;
  std::uint64_t input_length = 0;   ///< tokens
  std::uint64_t output_length = 0;  ///< tokens
  /// One for every 512 tokens of the prompt; equal ids mean equal prefixes.
  std::vector<std::uint64_t> hash_ids;
};

/// Reads at most `most` requests (0: all). `name` stands in the errors, which name the line too: JSON that
/// does not parse, fields missing or of the wrong type, too few or too many hash_ids, time going back.
Result<std::vector<TraceRequest>> read_trace(std::istream& input, const std::string& name, std::uint64_t most);

/// The same from a file.
Result<std::vector<TraceRequest>> read_trace_file(const std::string& file, std::uint64_t most);

}  // namespace kvferry::bench
