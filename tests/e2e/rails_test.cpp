// Several rails to one peer: what one of them loses the others carry, and what is lost for good says so.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <thread>

#include <kvferry/transports/shm/options.hpp>
#include <kvferry/transports/shm/shm_transport.hpp>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

/// Gives the first poller's port one fault plan, the second's another, and so on.
class PlanPerPort final : public Transport {
 public:
  PlanPerPort(const std::string& kind, std::vector<std::shared_ptr<FaultPlan>> plans) : inner_(make_transport(kind)) {
    for (auto& plan : plans) ports_.push_back(make_fault_transport(inner_, std::move(plan), kind));
  }

  std::string_view name() const override { return inner_->name(); }
  Status reaches(const HostFacts& self, const HostFacts& peer) const override { return inner_->reaches(self, peer); }
  Result<std::string> register_region(const RegionRecord& region) override { return inner_->register_region(region); }
  void unregister_region(const RegionRecord& region) override { inner_->unregister_region(region); }
  Result<std::unique_ptr<Port>> open_port(const PortContext& context, PortEvents& events) override {
    return ports_.at(next_++)->open_port(context, events);
  }

 private:
  std::shared_ptr<Transport> inner_;
  std::vector<std::shared_ptr<Transport>> ports_;
  std::size_t next_ = 0;
};

/// Keeps writes of a pattern under way until it is told to stop; then says how they ended.
class Traffic {
 public:
  Traffic(Engine& engine, Peer peer, Region local, Region remote)
      : engine_(engine), peer_(std::move(peer)), local_(std::move(local)), remote_(std::move(remote)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Traffic() {
    if (thread_.joinable()) finish();
  }

  std::uint64_t ended() const { return ended_; }

  /// Every write has ended ok, and every byte of it is there.
  void finish() {
    stop_ = true;
    thread_.join();
    EXPECT_TRUE(first_error_.is_ok()) << first_error_.to_string();
    EXPECT_EQ(std::memcmp(local_.data(), remote_.data(), local_.size()), 0);
  }

 private:
  void run() {
    constexpr std::uint64_t share = 256 * kib;
    const std::uint64_t places = local_.size() / share;
    std::deque<Transfer> running;
    const auto wait_for_oldest = [&] {
      const Status status = running.front().wait();
      if (!status.is_ok() && first_error_.is_ok()) first_error_ = status;
      running.pop_front();
      ++ended_;
    };
    for (std::uint64_t i = 0; !stop_ || i < 2 * places; ++i) {
      const std::uint64_t place = i % places * share;
      // Nobody else moves this part now: at most `places` writes are under way.
      if (running.size() == places) wait_for_oldest();
      fill(local_.bytes().subspan(place, share), i, place);
      const Slice slice{place, place, share};
      running.push_back(engine_.write(peer_, local_, remote_.name(), {&slice, 1}));
    }
    while (!running.empty()) wait_for_oldest();
  }

  Engine& engine_;
  Peer peer_;
  Region local_;
  Region remote_;
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> ended_{0};
  Status first_error_;
  std::thread thread_;
};

void expect_more(const Traffic& traffic, std::uint64_t count) {
  const std::uint64_t before = traffic.ended();
  EXPECT_TRUE(eventually(slow(10s), [&] { return traffic.ended() >= before + count; })) << "the traffic stands still";
}

class RailsTest : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(, RailsTest, each_transport(), transport_name);

TEST_P(RailsTest, OneOfThreeGoesDownInTheMiddle) {
  std::vector<std::shared_ptr<FaultPlan>> plans;
  for (int i = 0; i < 3; ++i) plans.push_back(std::make_shared<FaultPlan>());
  EngineConfig config = config_of("initiator");
  config.rails = config.pollers = 3;
  Pair pair(config_of("target", GetParam()), config, {std::make_shared<PlanPerPort>(GetParam(), plans)});
  const Region theirs = pair.target.allocate("kv", 8 * mib).value();
  const Region ours = pair.initiator.allocate("local", 8 * mib).value();

  Traffic traffic(pair.initiator, pair.peer, ours, theirs);
  expect_more(traffic, 100);
  for (const auto& plan : plans) EXPECT_GT(plan->items, 0u) << "every rail takes its part";
  for (int round = 0; round < 3; ++round) {
    plans[1]->rail_down = true;
    expect_more(traffic, 100);
    plans[1]->rail_down = false;
    const std::uint64_t before = plans[1]->items;
    EXPECT_TRUE(eventually(slow(5s), [&] { return plans[1]->items > before; })) << "a rail that is back is used again";
  }
  traffic.finish();
  EXPECT_EQ(counter(pair.initiator, "transfers_failed"), 0u);
  EXPECT_GE(counter(pair.initiator, "channels_lost"), 1u);
}

TEST_P(RailsTest, AllGoDownAndComeUpAgain) {
  const std::string kind = GetParam();
  EngineConfig config = config_of("initiator", kind);
  config.rails = 3;
  FaultyPair faulty(kind, config_of("target", kind), config);
  Engine& engine = faulty.pair.initiator;
  const Region theirs = faulty.pair.target.allocate("kv", 8 * mib).value();
  const Region ours = engine.allocate("local", 8 * mib).value();

  Traffic traffic(engine, faulty.pair.peer, ours, theirs);
  expect_more(traffic, 100);
  for (int round = 0; round < 3; ++round) {
    faulty.plan->rail_down = true;
    EXPECT_TRUE(eventually(slow(5s), [&] { return faulty.pair.peer.describe().starts_with("no rail is up"); }))
        << faulty.pair.peer.describe();
    std::this_thread::sleep_for(100ms);
    faulty.plan->rail_down = false;
    expect_more(traffic, 100);
  }
  traffic.finish();
  EXPECT_EQ(counter(engine, "transfers_failed"), 0u);
  EXPECT_GE(counter(engine, "channels_lost"), 3u + 1 + 1) << "three at first, then those that had come back";
}

TEST_P(RailsTest, FailedItemsAreTriedAgainAndCounted) {
  FaultyPair faulty(GetParam());
  Engine& engine = faulty.pair.initiator;
  const Region theirs = faulty.pair.target.allocate("kv", 4 * mib).value();
  const Region ours = engine.allocate("local", 4 * mib).value();
  fill(ours.bytes(), 1);
  faulty.plan->fail_items = 5;
  faulty.plan->refuse_posts = 5;
  const Slice all{0, 0, 4 * mib};
  const Status status = engine.write(faulty.pair.peer, ours, "kv", {&all, 1}).wait();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(theirs.bytes(), 1), 0u);
  EXPECT_EQ(counter(engine, "items_retried"), 5u);

  faulty.plan->fail_items = 1000;
  const Status hopeless = engine.write(faulty.pair.peer, ours, "kv", {&all, 1}).wait();
  faulty.plan->fail_items = 0;
  EXPECT_EQ(hopeless.code(), Errc::channel_error) << hopeless.to_string();
  EXPECT_NE(hopeless.text().find("times"), std::string_view::npos) << hopeless.text();
  EXPECT_TRUE(engine.write(faulty.pair.peer, ours, "kv", {&all, 1}).wait());
}

TEST_P(RailsTest, WithAllRailsDownTheDeadlineSaysWhy) {
  FaultyPair faulty(GetParam());
  Engine& engine = faulty.pair.initiator;
  const Region theirs = faulty.pair.target.allocate("kv", 4 * kib).value();
  const Region ours = engine.allocate("local", 4 * kib).value();
  const Slice all{0, 0, 4 * kib};
  ASSERT_TRUE(engine.write(faulty.pair.peer, ours, "kv", {&all, 1}).wait());
  faulty.plan->rail_down = true;
  ASSERT_TRUE(eventually(slow(5s), [&] { return !faulty.pair.peer.describe().starts_with("up"); }));
  const TimePoint begin = Clock::now();
  const Status status = engine.write(faulty.pair.peer, ours, "kv", {&all, 1}, {.deadline = slow(300ms)}).wait();
  EXPECT_LT(Clock::now() - begin, slow(600ms));
  EXPECT_FALSE(status.is_ok());
  EXPECT_NE(status.text().find("rail"), std::string_view::npos) << status.to_string();
  EXPECT_NE(status.text().find("target"), std::string_view::npos) << status.to_string();
}

TEST(Tiers, TheNextBestTransportTakesOverAndHandsBack) {
  const auto best = std::make_shared<FaultPlan>();
  const auto next = std::make_shared<FaultPlan>();
  Pair pair(config_of("target"), config_of("initiator"),
            {make_fault_transport(make_transport("shm"), best, "shm"),
             make_fault_transport(make_transport("tcp"), next, "tcp")});
  const Region theirs = pair.target.allocate("kv", 8 * mib).value();
  const Region ours = pair.initiator.allocate("local", 8 * mib).value();
  Traffic traffic(pair.initiator, pair.peer, ours, theirs);
  expect_more(traffic, 50);
  EXPECT_EQ(next->items, 0u) << "the slower transport is used only when it must be";
  best->rail_down = true;
  EXPECT_TRUE(eventually(slow(5s), [&] { return next->items > 50; }));
  EXPECT_TRUE(eventually(slow(5s), [&] { return pair.peer.describe() == "up over tcp"; })) << pair.peer.describe();
  best->rail_down = false;
  const std::uint64_t before = best->items;
  EXPECT_TRUE(eventually(slow(5s), [&] { return best->items > before + 50; }));
  traffic.finish();
  EXPECT_EQ(counter(pair.initiator, "transfers_failed"), 0u);
}

ssize_t refused_by_kernel(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long) {
  errno = EPERM;
  return -1;
}

shm::Options refusing_kernel() {
  shm::Options options;
  options.calls = {refused_by_kernel, refused_by_kernel};
  return options;
}

TEST(Tiers, WhatTheKernelRefusesGoesOverTcp) {
  Pair pair(config_of("target"), config_of("initiator"),
            {make_shm_transport(ShmConfig{}, refusing_kernel()), make_transport("tcp")});
  std::vector<std::byte> memory(2 * mib);
  const Region theirs = pair.target.register_memory("kv", memory.data(), memory.size()).value();
  const Region ours = pair.initiator.allocate("local", 2 * mib).value();
  fill(memory, 1);
  const Slice all{0, 0, 2 * mib};
  for (int i = 0; i < 3; ++i) {
    std::memset(ours.data(), 0, ours.size());
    const Status status = pair.initiator.read(pair.peer, ours, "kv", {&all, 1}).wait();
    EXPECT_TRUE(status) << status.to_string();
    EXPECT_EQ(wrong_bytes(ours.bytes(), 1), 0u);
  }
}

TEST(Tiers, WhenNothingIsLeftTheReasonsAreNamed) {
  Pair pair(config_of("target", "shm"), config_of("initiator"), {make_shm_transport(ShmConfig{}, refusing_kernel())});
  std::vector<std::byte> memory(64 * kib);
  const Region theirs = pair.target.register_memory("kv", memory.data(), memory.size()).value();
  const Region ours = pair.initiator.allocate("local", 64 * kib).value();
  const Slice all{0, 0, 64 * kib};
  for (int i = 0; i < 2; ++i) {
    const TimePoint begin = Clock::now();
    const Status status = pair.initiator.read(pair.peer, ours, "kv", {&all, 1}).wait();
    EXPECT_LT(Clock::now() - begin, slow(1s)) << "what can not be must not be waited for";
    EXPECT_EQ(status.code(), Errc::no_path) << status.to_string();
    for (const char* word : {"kv", "target", "shm"})
      EXPECT_NE(status.text().find(word), std::string_view::npos) << word << ": " << status.text();
  }
}

}  // namespace
}  // namespace kvferry::test
