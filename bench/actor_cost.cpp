// What the engine's own path costs: submission to completion over a transport that completes at
// once, so that nothing but actors, queues and bookkeeping is measured.
//
//   actor_cost --slices 1,160 --iterations 200000 --output text|json
//
// Two engines in one process; the target's poller sleeps, as a one-sided target's does.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <nlohmann/json.hpp>

#include <kvferry/actors/engine.hpp>
#include <kvferry/transports/transport.hpp>

#include "bench/sizes.hpp"

DEFINE_string(slices, "1,16,160,1024", "slices per transfer: a number or a list");
DEFINE_int64(iterations, 100000, "transfers per measurement");
DEFINE_int64(slice_size, 4096, "bytes per slice; no byte is moved");
DEFINE_string(output, "text", "text or json");

namespace kvferry::bench {
namespace {

/// Takes every item and completes it at the next poll, moving nothing.
class InstantPort final : public Port {
 public:
  explicit InstantPort(PortEvents& events) : events_(events) {}

  PortLimits limits() const override { return {}; }
  std::string address() const override { return "instant"; }
  Result<ChannelId> open(const ChannelSpec&) override {
    opening_.push_back(++last_channel_);
    return last_channel_;
  }
  std::size_t post(ChannelId, std::span<const WorkItem> items) override {
    for (const WorkItem& item : items) {
      // What every transport must do at least: look at each slice once.
      item.slices.for_each([&](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
        checksum_ += local ^ remote ^ length;
      });
      done_.push_back(item.cookie);
    }
    return items.size();
  }
  void cancel(ChannelId, std::uint64_t) override {}
  void fence(ChannelId channel, const Status& why) override { closing_.emplace_back(channel, why); }
  std::size_t poll(std::span<Completion> completions) override {
    for (const ChannelId channel : std::exchange(opening_, {})) events_.on_channel_up(channel);
    for (const auto& [channel, why] : std::exchange(closing_, {})) events_.on_channel_down(channel, why);
    const std::size_t count = std::min(completions.size(), done_.size());
    for (std::size_t i = 0; i < count; ++i) completions[i] = {done_[i], {}};
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  Progress progress() const override {
    return opening_.empty() && closing_.empty() && done_.empty() ? Progress::idle : Progress::runnable;
  }
  int wait_fd() const override { return -1; }
  TimePoint next_wakeup() const override { return TimePoint::max(); }
  bool release_region(RegionKey, bool) override { return true; }
  void drop_session(SessionId) override {}

 private:
  PortEvents& events_;
  ChannelId last_channel_ = 0;
  std::vector<ChannelId> opening_;
  std::vector<std::pair<ChannelId, Status>> closing_;
  std::vector<std::uint64_t> done_;
  std::uint64_t checksum_ = 0;
};

class InstantTransport final : public Transport {
 public:
  std::string_view name() const override { return "instant"; }
  bool one_sided() const override { return true; }
  Status reaches(const HostFacts&, const HostFacts&) const override { return {}; }
  Result<std::string> register_region(const RegionRecord&) override { return std::string(); }
  void unregister_region(const RegionRecord&) override {}
  Result<std::unique_ptr<Port>> open_port(const PortContext&, PortEvents& events) override {
    return std::unique_ptr<Port>(std::make_unique<InstantPort>(events));
  }
};

struct Cost {
  std::size_t slices = 0;
  double p50_us = 0;
  double p99_us = 0;
  double ns_per_slice = 0;
};

Cost measure(Engine& engine, const Peer& peer, const Region& local, const RemoteHandle& remote, std::size_t count) {
  // A gap after every slice, so that none merge.
  std::vector<Slice> slices;
  const auto size = static_cast<std::uint64_t>(FLAGS_slice_size);
  for (std::size_t i = 0; i < count; ++i) slices.push_back({i * 2 * size, i * 2 * size, size});
  std::vector<double> microseconds;
  microseconds.reserve(static_cast<std::size_t>(FLAGS_iterations));
  const auto warm_up = std::min<std::int64_t>(1000, FLAGS_iterations);
  for (std::int64_t i = -warm_up; i < FLAGS_iterations; ++i) {
    const auto start = Clock::now();
    const Status status = engine.read(peer, local, remote, slices).wait();
    const auto took = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    if (!status.is_ok()) throw StatusError(status);
    if (i >= 0) microseconds.push_back(took);
  }
  std::sort(microseconds.begin(), microseconds.end());
  Cost cost;
  cost.slices = count;
  cost.p50_us = microseconds[microseconds.size() / 2];
  cost.p99_us = microseconds[microseconds.size() * 99 / 100];
  cost.ns_per_slice = cost.p50_us * 1000 / static_cast<double>(count);
  return cost;
}

void print(const Cost& cost) {
  if (FLAGS_output == "json") {
    const nlohmann::ordered_json line = {
        {"slices", cost.slices}, {"p50_us", cost.p50_us}, {"p99_us", cost.p99_us}, {"ns_per_slice", cost.ns_per_slice}};
    fmt::print("{}\n", line.dump());
  } else {
    fmt::print("{:>8} slices   p50 {:>8.2f} us   p99 {:>8.2f} us   {:>8.1f} ns/slice\n", cost.slices, cost.p50_us,
               cost.p99_us, cost.ns_per_slice);
  }
  std::fflush(stdout);
}

int run() {
  if (FLAGS_output != "text" && FLAGS_output != "json")
    throw StatusError({Errc::invalid_argument, fmt::format("--output={}: not one of text, json", FLAGS_output)});
  if (FLAGS_iterations < 1 || FLAGS_slice_size < 1)
    throw StatusError({Errc::invalid_argument, "--iterations and --slice_size must be at least 1"});
  const auto counts = parse_size_list(FLAGS_slices);
  if (!counts) throw StatusError(counts.status().with_context("--slices"));
  const std::uint64_t most = *std::max_element(counts->begin(), counts->end());

  EngineConfig config;
  config.name = "initiator";
  auto initiator = Engine::start(config, {std::make_shared<InstantTransport>()}).value();
  config.name = "target";
  auto target = Engine::start(config, {std::make_shared<InstantTransport>()}).value();
  const std::uint64_t bytes = most * 2 * static_cast<std::uint64_t>(FLAGS_slice_size);
  const auto local = initiator.allocate("kv", bytes).value();
  static_cast<void>(target.allocate("kv", bytes).value());
  const auto peer = initiator.connect(target.address()).value();
  const auto remote = initiator.find_region(peer, "kv").value();
  for (const std::uint64_t count : *counts) print(measure(initiator, peer, local, remote, count));
  return 0;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  gflags::SetUsageMessage("the cost of the engine's path over a transport that completes at once");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return kvferry::bench::run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "actor_cost: {}\n", e.what());
    return 2;
  }
}
