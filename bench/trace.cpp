#include "bench/trace.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

/// Longest prompt that is believed: a larger number is a damaged file.
constexpr std::uint64_t max_tokens = std::uint64_t{1} << 32;

Status wrong(std::string_view why) { return {Errc::malformed, std::string(why)}; }

/// A value for an error text. What is nested is only named: the file may nest it as deep as it likes.
std::string shown(const Json& value) { return value.is_structured() ? value.type_name() : value.dump(); }

Result<std::uint64_t> tokens(const Json& line, const char* key) {
  const auto found = line.find(key);
  if (found == line.end()) return wrong(fmt::format("{} is missing", key));
  if (!found->is_number_unsigned() || found->get<std::uint64_t>() > max_tokens) {
    return wrong(fmt::format("{} is {}, not a number of tokens", key, shown(*found)));
  }
  return found->get<std::uint64_t>();
}

Result<std::vector<std::uint64_t>> hashes(const Json& line, std::uint64_t input_length) {
  const auto found = line.find("hash_ids");
  if (found == line.end() || !found->is_array()) return wrong("hash_ids is not an array");
  std::vector<std::uint64_t> ids;
  ids.reserve(found->size());
  for (const Json& id : *found) {
    if (!id.is_number_unsigned()) return wrong(fmt::format("hash_ids holds {}, not an id", shown(id)));
    ids.push_back(id.get<std::uint64_t>());
  }
  const std::uint64_t expected = (input_length + hash_tokens - 1) / hash_tokens;
  if (ids.size() == expected) return ids;
  return wrong(fmt::format("hash_ids has {} entries, but {} tokens make {} blocks of {}", ids.size(), input_length,
                           expected, hash_tokens));
}

Result<TraceRequest> parse_line(const std::string& text, double earliest_ms) {
  const Json line = Json::parse(text, nullptr, false);
  if (line.is_discarded() || !line.is_object()) return wrong("it is not a JSON object");
  TraceRequest request;
  const auto time = line.find("timestamp");
  if (time == line.end() || !time->is_number()) return wrong("timestamp is not a number of milliseconds");
  request.timestamp_ms = time->get<double>();
  if (request.timestamp_ms < earliest_ms) {
    return wrong(fmt::format("timestamp {} lies before the line above it ({})", request.timestamp_ms, earliest_ms));
  }
  auto input_length = tokens(line, "input_length");
  if (!input_length) return input_length.status();
  auto output_length = tokens(line, "output_length");
  if (!output_length) return output_length.status();
  auto ids = hashes(line, *input_length);
  if (!ids) return ids.status();
  request.input_length = *input_length;
  request.output_length = *output_length;
  request.hash_ids = std::move(*ids);
  return request;
}

}  // namespace

Result<std::vector<TraceRequest>> read_trace(std::istream& input, const std::string& name, std::uint64_t most) {
  std::vector<TraceRequest> requests;
  std::string text;
  double earliest_ms = 0;
  for (std::uint64_t line = 1; (most == 0 || requests.size() < most) && std::getline(input, text); ++line) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto request = parse_line(text, earliest_ms);
    if (!request) return request.status().with_context(fmt::format("{}:{}", name, line));
    earliest_ms = request->timestamp_ms;
    requests.push_back(std::move(*request));
  }
  if (requests.empty()) return Status(Errc::malformed, fmt::format("{}: there is no request in it", name));
  return requests;
}

Result<std::vector<TraceRequest>> read_trace_file(const std::string& file, std::uint64_t most) {
  std::ifstream input(file);
  if (!input) return Status(Errc::invalid_argument, fmt::format("--trace: {}: {}", file, std::strerror(errno)));
  return read_trace(input, file, most);
}

}  // namespace kvferry::bench
