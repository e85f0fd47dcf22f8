#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include <fmt/format.h>

#include <kvferry/runtime/metrics.hpp>

namespace kvferry {

namespace {

struct CounterField {
  std::string_view name;
  std::atomic<std::uint64_t> MetricCounters::*counter;
  std::string_view help;
};

constexpr CounterField counter_fields[] = {
    {"transfers_started", &MetricCounters::transfers_started, "Transfers submitted."},
    {"transfers_ok", &MetricCounters::transfers_ok, "Transfers that ended ok."},
    {"transfers_failed", &MetricCounters::transfers_failed, "Transfers that ended with an error."},
    {"bytes_read", &MetricCounters::bytes_read, "Bytes read from peers."},
    {"bytes_written", &MetricCounters::bytes_written, "Bytes written to peers."},
    {"slices", &MetricCounters::slices, "Slices carried, after neighbours were merged."},
    {"items_posted", &MetricCounters::items_posted, "Work items that transports took."},
    {"items_retried", &MetricCounters::items_retried, "Work items tried again on another channel."},
    {"channels_opened", &MetricCounters::channels_opened, "Channels that came up."},
    {"channels_lost", &MetricCounters::channels_lost, "Channels that broke or were fenced."},
    {"fences", &MetricCounters::fences, "Channels fenced to quieten a transfer."},
    {"notifications", &MetricCounters::notifications, "Immediates received."},
    {"messages", &MetricCounters::messages, "Messages received."},
    {"handshakes_refused", &MetricCounters::handshakes_refused, "Handshakes that this engine refused."},
    {"malformed_messages", &MetricCounters::malformed_messages, "Messages that did not follow their format."},
};

std::string_view help_of(std::string_view name) {
  for (const CounterField& field : counter_fields)
    if (field.name == name) return field.help;
  return "A counter.";
}

}  // namespace

std::uint64_t LatencyHistogram::count() const noexcept {
  std::uint64_t count = 0;
  for (const auto& bucket : buckets_) count += bucket.load(std::memory_order_relaxed);
  return count;
}

double LatencyHistogram::mean_ns() const noexcept {
  const std::uint64_t records = count();
  return records == 0 ? 0 : static_cast<double>(sum_.load(std::memory_order_relaxed)) / static_cast<double>(records);
}

std::uint64_t LatencyHistogram::percentile_ns(double fraction) const noexcept {
  const std::uint64_t records = count();
  if (records == 0) return 0;
  const double wanted = std::ceil(std::clamp(fraction, 0.0, 1.0) * static_cast<double>(records));
  const std::uint64_t rank = std::clamp<std::uint64_t>(static_cast<std::uint64_t>(wanted), 1, records);
  std::uint64_t seen = 0;
  std::size_t last = 0;
  for (std::size_t bucket = 0; bucket < bucket_count && seen < rank; ++bucket) {
    seen += buckets_[bucket].load(std::memory_order_relaxed);
    last = bucket;
  }
  return upper_bound_of(last);
}

Metrics Metrics::of(const MetricCounters& counters) {
  Metrics metrics;
  for (const CounterField& field : counter_fields)
    metrics.counters.emplace(field.name, (counters.*field.counter).load(std::memory_order_relaxed));
  metrics.latency_count = counters.latency.count();
  metrics.latency_mean_us = counters.latency.mean_ns() / 1e3;
  metrics.latency_p50_us = static_cast<double>(counters.latency.percentile_ns(0.5)) / 1e3;
  metrics.latency_p99_us = static_cast<double>(counters.latency.percentile_ns(0.99)) / 1e3;
  return metrics;
}

std::string Metrics::to_prometheus() const {
  std::string text;
  auto out = std::back_inserter(text);
  for (const auto& [name, value] : counters) {
    fmt::format_to(out, "# HELP kvferry_{0}_total {1}\n# TYPE kvferry_{0}_total counter\nkvferry_{0}_total {2}\n", name,
                   help_of(name), value);
  }
  constexpr std::string_view latency = "kvferry_transfer_latency_seconds";
  fmt::format_to(out, "# HELP {0} Time from submission to end of transfers that ended ok.\n# TYPE {0} summary\n",
                 latency);
  fmt::format_to(out, "{}{{quantile=\"0.5\"}} {}\n", latency, latency_p50_us / 1e6);
  fmt::format_to(out, "{}{{quantile=\"0.99\"}} {}\n", latency, latency_p99_us / 1e6);
  fmt::format_to(out, "{}_sum {}\n", latency, latency_mean_us / 1e6 * static_cast<double>(latency_count));
  fmt::format_to(out, "{}_count {}\n", latency, latency_count);
  return text;
}

}  // namespace kvferry
