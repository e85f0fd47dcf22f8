#include <cmath>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/runtime/metrics.hpp>

namespace kvferry {
namespace {

TEST(LatencyHistogram, IsEmptyAtFirst) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.count(), 0u);
  EXPECT_EQ(histogram.mean_ns(), 0);
  EXPECT_EQ(histogram.percentile_ns(0.99), 0u);
}

TEST(LatencyHistogram, SmallValuesAreExact) {
  for (std::uint64_t value = 0; value < 16; ++value) {
    LatencyHistogram histogram;
    histogram.record(value);
    EXPECT_EQ(histogram.percentile_ns(0.5), value);
  }
}

TEST(LatencyHistogram, KeepsEveryValueWithinASixteenth) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 300; ++i) {
    const std::uint64_t value = random() >> (random() % 64);
    LatencyHistogram histogram;
    histogram.record(value);
    const std::uint64_t shown = histogram.percentile_ns(1.0);
    EXPECT_GE(shown, value);
    EXPECT_LE(shown - value, value / 16) << value;
  }
}

TEST(LatencyHistogram, TakesTheLargestValue) {
  LatencyHistogram histogram;
  histogram.record(~std::uint64_t{0});
  EXPECT_EQ(histogram.count(), 1u);
  EXPECT_EQ(histogram.percentile_ns(1.0), ~std::uint64_t{0});
}

TEST(LatencyHistogram, PercentilesRankTheRecords) {
  LatencyHistogram histogram;
  for (std::uint64_t value = 1; value <= 1000; ++value) histogram.record(value * 1000);
  EXPECT_DOUBLE_EQ(histogram.mean_ns(), 500'500);
  const auto near = [&](double fraction, double wanted) {
    const auto shown = static_cast<double>(histogram.percentile_ns(fraction));
    EXPECT_GE(shown, wanted);
    EXPECT_LE(shown, wanted * (1 + 1.0 / 16));
  };
  near(0.0, 1000);
  near(0.5, 500'000);
  near(0.99, 990'000);
  near(1.0, 1'000'000);
}

TEST(LatencyHistogram, CountsFromManyThreads) {
  LatencyHistogram histogram;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) histogram.record(100);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(histogram.count(), 20'000u);
  EXPECT_DOUBLE_EQ(histogram.mean_ns(), 100);
}

TEST(Metrics, CopiesEveryCounter) {
  MetricCounters counters;
  counters.transfers_started = 1;
  counters.transfers_ok = 2;
  counters.transfers_failed = 3;
  counters.bytes_read = 4;
  counters.bytes_written = 5;
  counters.slices = 6;
  counters.items_posted = 7;
  counters.items_retried = 8;
  counters.channels_opened = 9;
  counters.channels_lost = 10;
  counters.fences = 11;
  counters.notifications = 12;
  counters.messages = 13;
  counters.handshakes_refused = 14;
  counters.malformed_messages = 15;
  counters.latency.record(10'000);
  const Metrics metrics = Metrics::of(counters);
  const std::map<std::string, std::uint64_t> expected{
      {"transfers_started", 1},
      {"transfers_ok", 2},
      {"transfers_failed", 3},
      {"bytes_read", 4},
      {"bytes_written", 5},
      {"slices", 6},
      {"items_posted", 7},
      {"items_retried", 8},
      {"channels_opened", 9},
      {"channels_lost", 10},
      {"fences", 11},
      {"notifications", 12},
      {"messages", 13},
      {"handshakes_refused", 14},
      {"malformed_messages", 15},
  };
  EXPECT_EQ(metrics.counters, expected);
  EXPECT_EQ(metrics.latency_count, 1u);
  EXPECT_DOUBLE_EQ(metrics.latency_mean_us, 10);
  EXPECT_NEAR(metrics.latency_p50_us, 10, 10.0 / 16);
  EXPECT_NEAR(metrics.latency_p99_us, 10, 10.0 / 16);
}

TEST(Metrics, PrometheusTextHasEveryCounterWithHelpAndType) {
  MetricCounters counters;
  counters.bytes_read = 123'456'789'012;
  counters.latency.record(2'000'000);
  const Metrics metrics = Metrics::of(counters);
  const std::string text = metrics.to_prometheus();
  EXPECT_NE(text.find("\nkvferry_bytes_read_total 123456789012\n"), std::string::npos) << text;
  EXPECT_NE(text.find("kvferry_transfer_latency_seconds_count 1\n"), std::string::npos) << text;
  EXPECT_NE(text.find("kvferry_transfer_latency_seconds_sum 0.002\n"), std::string::npos) << text;
  for (const auto& [name, value] : metrics.counters) {
    EXPECT_NE(text.find("# HELP kvferry_" + name + "_total "), std::string::npos) << name;
    EXPECT_NE(text.find("# TYPE kvferry_" + name + "_total counter\n"), std::string::npos) << name;
  }
}

TEST(Metrics, PrometheusLinesAreCommentsOrSamples) {
  const std::string text = Metrics::of(MetricCounters()).to_prometheus();
  ASSERT_EQ(text.back(), '\n');
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("# ", 0) == 0) continue;
    const std::size_t space = line.rfind(' ');
    ASSERT_NE(space, std::string::npos) << line;
    EXPECT_EQ(line.rfind("kvferry_", 0), 0u) << line;
    std::size_t read = 0;
    std::stod(line.substr(space + 1), &read);
    EXPECT_EQ(read, line.size() - space - 1) << line;
  }
}

}  // namespace
}  // namespace kvferry
