#include "bench/report.hpp"

#include <cmath>
#include <utility>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/sizes.hpp"

namespace kvferry::bench {
namespace {

/// Keeps the order of the fields.
using Record = nlohmann::ordered_json;

/// The fields that CSV has, in its order; JSON has more behind them.
constexpr const char* csv_fields[] = {"transport",      "op",        "block_size",     "batch_size",
                                      "concurrency",    "trips",     "latency_avg_us", "latency_p50_us",
                                      "latency_p99_us", "mib_per_s", "ops_per_s",      "floor_ratio",
                                      "verified"};

/// Three decimals: more would pretend to a precision that no clock has here.
double rounded(double value) { return std::round(value * 1e3) / 1e3; }

/// Four digits that count: a ratio may be far below 1.
double rounded_ratio(double value) {
  if (value <= 0) return 0;
  const double unit = std::pow(10, std::floor(std::log10(value)) - 3);
  return std::round(value / unit) * unit;
}

template <class T>
Record or_null(const std::optional<T>& value) {
  return value ? Record(*value) : Record(nullptr);
}

Record make_record(const CaseResult& result) {
  const Workload& workload = result.bench_case.workload;
  Record record;
  record["transport"] = result.transport;
  record["op"] = to_string(result.bench_case.op);
  record["block_size"] = workload.block_size;
  record["batch_size"] = workload.batch_size;
  record["concurrency"] = workload.parts;
  record["trips"] = result.trips;
  record["latency_avg_us"] = rounded(result.average_us);
  record["latency_p50_us"] = rounded(result.p50_us);
  record["latency_p99_us"] = rounded(result.p99_us);
  record["mib_per_s"] = rounded(result.mib_per_s());
  record["ops_per_s"] = rounded(result.ops_per_s());
  record["floor_ratio"] = result.floor_ratio ? Record(rounded_ratio(*result.floor_ratio)) : Record(nullptr);
  record["verified"] = or_null(result.verified);
  record["floor_p50_us"] = result.floor_ratio ? Record(rounded(result.floor_p50_us)) : Record(nullptr);
  record["floor"] = result.floor_ratio ? Record(result.floor_name) : Record(nullptr);
  record["seconds"] = rounded(result.seconds);
  record["num_rails"] = result.num_rails;
  record["pattern"] = to_string(workload.pattern);
  return record;
}

std::string csv_row(const Record& record) {
  std::string row;
  for (const char* field : csv_fields) {
    const Record& value = record[field];
    if (!row.empty()) row += ',';
    row += value.is_null() ? "" : value.is_string() ? value.get<std::string>() : value.dump();
  }
  return row + "\n";
}

std::string csv_header() {
  std::string header;
  for (const char* field : csv_fields) header += std::string(header.empty() ? "" : ",") + field;
  return header + "\n";
}

std::string yes_or_no(const std::optional<bool>& value) { return !value ? "-" : *value ? "yes" : "NO"; }

constexpr const char* text_format =
    "{:<9} {:<5} {:>6} {:>6} {:>8} {:>10} {:>7} {:>11} {:>11} {:>11} {:>9} {:>10} {:>6} {:>5}\n";

std::string text_header() {
  return fmt::format(text_format, "op", "path", "block", "batch", "trips", "MiB", "s", "avg us", "p50 us", "p99 us",
                     "MiB/s", "op/s", "floor", "bytes") +
         fmt::format(text_format, "", "", "", "", "", "moved", "timed", "per trip", "per trip", "per trip", "",
                     "(blocks)", "ratio", "right");
}

std::string text_row(const CaseResult& result) {
  const Workload& workload = result.bench_case.workload;
  return fmt::format(text_format, to_string(result.bench_case.op), result.transport, format_size(workload.block_size),
                     workload.batch_size, result.trips, fmt::format("{:.1f}", result.bytes() / (1 << 20)),
                     fmt::format("{:.2f}", result.seconds), fmt::format("{:.2f}", result.average_us),
                     fmt::format("{:.2f}", result.p50_us), fmt::format("{:.2f}", result.p99_us),
                     fmt::format("{:.0f}", result.mib_per_s()), fmt::format("{:.0f}", result.ops_per_s()),
                     result.floor_ratio ? fmt::format("{:.2f}", *result.floor_ratio) : "-", yes_or_no(result.verified));
}

Record make_record(const TraceResult& result) {
  Record record;
  record["trace"] = result.options.file;
  record["model"] = result.options.model.name;
  record["transport"] = result.transport;
  record["speed"] = result.options.speed;
  record["requests"] = result.requests;
  record["fully_cached"] = result.fully_cached;
  record["bytes"] = result.bytes;
  record["skipped_share"] = rounded(result.skipped_share());
  record["latency_avg_us"] = rounded(result.latency.average_us());
  record["latency_p50_us"] = rounded(result.latency.quantile_us(0.5));
  record["latency_p90_us"] = rounded(result.latency.quantile_us(0.9));
  record["latency_p99_us"] = rounded(result.latency.quantile_us(0.99));
  record["latency_max_us"] = rounded(result.latency.max_us());
  record["mib_per_s"] = rounded(result.mib_per_s());
  record["ttft_ms"] = result.options.ttft_ms;
  record["ttft_us_per_token"] = result.options.ttft_us_per_token;
  record["share_under_5_percent_of_ttft"] = rounded(result.share_under_budget());
  record["max_lag_ms"] = rounded(result.max_lag_ms);
  record["verified"] = or_null(result.verified);
  return record;
}

std::string trace_csv(const Record& record) {
  std::string header;
  std::string row;
  for (const auto& [field, value] : record.items()) {
    const char* comma = header.empty() ? "" : ",";
    header += comma + field;
    row += comma + (value.is_null() ? "" : value.dump());
  }
  return header + "\n" + row + "\n";
}

std::string trace_text(const TraceResult& result) {
  const LatencyStats& latency = result.latency;
  const TraceOptions& options = result.options;
  std::string text = fmt::format("trace {} as {} over {}\n", options.file, options.model.name, result.transport);
  const auto line = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<28} {}\n", name, value);
  };
  line("requests", fmt::format("{} ({} held completely by the decode side)", result.requests, result.fully_cached));
  line("MiB moved", fmt::format("{:.1f}", static_cast<double>(result.bytes) / (1 << 20)));
  line("share skipped", fmt::format("{:.1f} % of all KV bytes", 100 * result.skipped_share()));
  line("latency p50 / p90",
       fmt::format("{:.3f} / {:.3f} ms", latency.quantile_us(0.5) / 1e3, latency.quantile_us(0.9) / 1e3));
  line("latency p99 / max", fmt::format("{:.3f} / {:.3f} ms", latency.quantile_us(0.99) / 1e3, latency.max_us() / 1e3));
  line("MiB/s while moving", fmt::format("{:.0f}", result.mib_per_s()));
  line("transfer under 5 % of TTFT",
       fmt::format("{:.1f} % of requests (TTFT {} ms + {} us a token)", 100 * result.share_under_budget(),
                   options.ttft_ms, options.ttft_us_per_token));
  if (options.speed > 0) line("latest start", fmt::format("{:.1f} ms after its time", result.max_lag_ms));
  line("every byte right", yes_or_no(result.verified));
  return text;
}

}  // namespace

std::string sweep_header(Output output) {
  return output == Output::text ? text_header() : output == Output::csv ? csv_header() : std::string();
}

std::string sweep_row(Output output, const CaseResult& result) {
  if (output == Output::text) return text_row(result);
  const Record record = make_record(result);
  return output == Output::csv ? csv_row(record) : record.dump() + "\n";
}

std::string trace_report(Output output, const TraceResult& result) {
  if (output == Output::text) return trace_text(result);
  const Record record = make_record(result);
  return output == Output::csv ? trace_csv(record) : record.dump() + "\n";
}

}  // namespace kvferry::bench
