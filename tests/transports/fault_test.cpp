// The fault transport keeps the contract while it misbehaves, and misbehaves as the plan says.
#include <algorithm>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include <kvferry/transports/fault.hpp>

#include "tests/support/memory_transport.hpp"
#include "tests/transports/contract_fixture.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t incarnation = 7;
constexpr SessionId session = 42;
constexpr std::uint64_t region_bytes = 4096;

class FaultTest : public ::testing::Test {
 protected:
  FaultTest() {
    token.fill(std::byte{7});
    target.events.sessions[token] = session;
    local = initiator.add_region("local", region_bytes);
    remote_record = target.add_region("remote", region_bytes);
    remote = target.remote_view(*remote_record);
    std::fill_n(remote_record->data, region_bytes, std::byte{1});
    channel = open();
  }

  // Small limits, so that a port fills up soon.
  std::shared_ptr<Transport> make_inner() {
    MemoryOptions options;
    options.control = control;
    options.limits.channel_items = 8;
    return make_memory_transport(options);
  }
  ContractParam memory() {
    return {"memory", [this] { return make_inner(); }};
  }
  ContractParam faulty() {
    return {"fault", [this] { return make_fault_transport(make_inner(), plan); }};
  }

  ChannelSpec spec() const {
    ChannelSpec made;
    made.address = target.port->address();
    made.token = token;
    made.target_incarnation = incarnation;
    made.give_up = Clock::now() + 5s;
    return made;
  }
  ChannelId open() {
    const ChannelId opened = initiator.port->open(spec()).value();
    step();
    EXPECT_EQ(initiator.events.up.back(), opened);
    return opened;
  }

  /// Enough polls for anything that needs no time to pass.
  void step() {
    for (int i = 0; i < 4; ++i) {
      initiator.poll();
      target.poll();
    }
  }
  bool step_until(const std::function<bool()>& done) {
    const TimePoint limit = Clock::now() + 10s;
    while (!done() && Clock::now() < limit) step();
    return done();
  }

  WorkItem item(Op op = Op::read) {
    WorkItem made;
    made.op = op;
    made.cookie = ++last_cookie;
    made.local = local.get();
    made.remote = &remote;
    made.slices = {&whole, 1, 0, whole.length};
    return made;
  }
  bool post(const WorkItem& work) { return initiator.port->post(channel, {&work, 1}) == 1; }
  bool done(const WorkItem& work) const { return initiator.completions.contains(work.cookie); }
  Errc outcome(const WorkItem& work) const { return initiator.completions.at(work.cookie).code(); }

  std::ptrdiff_t local_bytes_equal_to(int value) const {
    return std::count(local->data, local->data + region_bytes, static_cast<std::byte>(value));
  }
  bool has_arrived() const { return local_bytes_equal_to(1) == static_cast<std::ptrdiff_t>(region_bytes); }
  bool is_untouched() const { return local_bytes_equal_to(0) == static_cast<std::ptrdiff_t>(region_bytes); }

  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  std::shared_ptr<MemoryControl> control = std::make_shared<MemoryControl>();
  Side target{memory(), incarnation};
  Side initiator{faulty(), 1};
  Token token{};
  std::shared_ptr<const RegionRecord> local;
  std::shared_ptr<const RegionRecord> remote_record;
  RemoteRegion remote;
  const Slice whole{0, 0, region_bytes};
  ChannelId channel = 0;
  std::uint64_t last_cookie = 0;
};

TEST_F(FaultTest, WithoutFaultsItIsTransparent) {
  EXPECT_EQ(initiator.transport->name(), "fault+memory");
  EXPECT_EQ(make_fault_transport(make_inner(), plan, "slow")->name(), "slow");
  EXPECT_EQ(initiator.port->limits().channel_items, 8u);
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  step();
  EXPECT_EQ(outcome(work), Errc::ok);
  EXPECT_TRUE(has_arrived());
  EXPECT_EQ(plan->items, 1u);
}

TEST_F(FaultTest, NotificationsAndMessagesPassBothWays) {
  const std::string text = "hello";
  WorkItem send = item(Op::send);
  send.message = std::as_bytes(std::span(text));
  WorkItem immediate = item(Op::write_imm);
  immediate.immediate = 99;
  ASSERT_TRUE(post(send) && post(immediate));
  step();
  ASSERT_EQ(target.events.messages.size(), 1u);
  EXPECT_EQ(target.events.messages[0].bytes.size(), text.size());
  ASSERT_EQ(target.events.immediates.size(), 1u);
  EXPECT_EQ(target.events.immediates[0].value, 99u);
  EXPECT_EQ(outcome(send), Errc::ok);
  EXPECT_EQ(outcome(immediate), Errc::ok);
}

// ---- delay

TEST_F(FaultTest, DelayedItemsMoveLater) {
  plan->delay_us = 20'000;
  const TimePoint start = Clock::now();
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  initiator.poll();
  EXPECT_TRUE(is_untouched());
  EXPECT_EQ(initiator.port->progress(), Progress::waiting);
  EXPECT_LE(initiator.port->next_wakeup(), Clock::now() + 20ms);
  ASSERT_TRUE(step_until([&] { return done(work); }));
  EXPECT_GE(Clock::now() - start, 20ms);
  EXPECT_EQ(outcome(work), Errc::ok);
  EXPECT_TRUE(has_arrived());
}

TEST_F(FaultTest, DelayedItemsCountAgainstTheChannelsLimit) {
  plan->delay_us = 1'000;
  std::vector<WorkItem> items;
  for (int i = 0; i < 10; ++i) items.push_back(item());
  EXPECT_EQ(initiator.port->post(channel, items), 8u);
  EXPECT_EQ(initiator.port->post(channel, items), 0u);
  ASSERT_TRUE(step_until([&] { return initiator.completions.size() == 8; }));
}

TEST_F(FaultTest, DelayedItemsCanBeCancelled) {
  plan->delay_us = 3'600'000'000;
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  initiator.port->cancel(channel, work.cookie);
  step();
  EXPECT_EQ(outcome(work), Errc::cancelled);
  EXPECT_EQ(plan->cancels, 1u);
  EXPECT_TRUE(is_untouched());
}

TEST_F(FaultTest, IgnoredCancelsLeaveTheItemToTheFence) {
  plan->delay_us = 3'600'000'000;
  plan->ignore_cancel = true;
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  initiator.port->cancel(channel, work.cookie);
  step();
  EXPECT_FALSE(done(work));
  EXPECT_EQ(plan->cancels, 1u);

  initiator.port->fence(channel, {Errc::timed_out, "the deadline passed"});
  step();
  EXPECT_EQ(outcome(work), Errc::channel_error);
  EXPECT_EQ(initiator.completions.at(work.cookie).text(), "the deadline passed");
  EXPECT_EQ(initiator.events.down.at(channel).code(), Errc::timed_out);
  EXPECT_EQ(plan->fences, 1u);
  EXPECT_TRUE(is_untouched());
}

TEST_F(FaultTest, CancelReachesWhatTheInnerPortHolds) {
  control->hold = true;
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  step();
  EXPECT_FALSE(done(work));
  initiator.port->cancel(channel, work.cookie);
  step();
  EXPECT_EQ(outcome(work), Errc::cancelled);
  control->release(1);
  step();
  EXPECT_TRUE(is_untouched());
}

TEST_F(FaultTest, ADelayedItemWaitsUntilTheInnerPortHasRoom) {
  control->hold = true;
  std::vector<WorkItem> items;
  for (int i = 0; i < 4; ++i) items.push_back(item());
  plan->delay_us = 1;
  ASSERT_EQ(initiator.port->post(channel, items), 4u);
  std::this_thread::sleep_for(1ms);
  step();
  EXPECT_TRUE(initiator.completions.empty());
  control->release(3);
  step();
  EXPECT_EQ(initiator.completions.size(), 3u);
  control->hold = false;
  step();
  EXPECT_EQ(initiator.completions.size(), 4u);
}

// ---- held completions

TEST_F(FaultTest, CompletionsAreReportedLater) {
  plan->completion_delay_us = 20'000;
  const TimePoint start = Clock::now();
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  initiator.poll();
  EXPECT_TRUE(has_arrived());
  EXPECT_FALSE(done(work));
  EXPECT_EQ(initiator.port->progress(), Progress::waiting);
  ASSERT_TRUE(step_until([&] { return done(work); }));
  EXPECT_GE(Clock::now() - start, 20ms);
  EXPECT_EQ(outcome(work), Errc::ok);
}

TEST_F(FaultTest, FenceReleasesHeldCompletionsAtOnce) {
  plan->completion_delay_us = 3'600'000'000;
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  step();
  EXPECT_FALSE(done(work));
  initiator.port->fence(channel, {Errc::cancelled, "enough"});
  step();
  EXPECT_EQ(outcome(work), Errc::ok);
}

TEST_F(FaultTest, FenceDoesNotHoldWhatItEnds) {
  control->hold = true;
  plan->completion_delay_us = 3'600'000'000;
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  step();
  initiator.port->fence(channel, {Errc::cancelled, "enough"});
  step();
  EXPECT_EQ(outcome(work), Errc::channel_error);
  EXPECT_TRUE(initiator.events.down.contains(channel));
}

// ---- refused, failed and corrupted items

TEST_F(FaultTest, RefusesSoManyPosts) {
  plan->refuse_posts = 2;
  const WorkItem work = item();
  EXPECT_FALSE(post(work));
  EXPECT_FALSE(post(work));
  EXPECT_TRUE(post(work));
  EXPECT_EQ(plan->items, 1u);
}

TEST_F(FaultTest, FailsSoManyItemsUndone) {
  plan->fail_items = 1;
  const WorkItem first = item();
  const WorkItem second = item();
  ASSERT_TRUE(post(first));
  step();
  EXPECT_EQ(outcome(first), Errc::channel_error);
  EXPECT_TRUE(is_untouched());
  ASSERT_TRUE(post(second));
  step();
  EXPECT_EQ(outcome(second), Errc::ok);
  EXPECT_TRUE(has_arrived());
}

TEST_F(FaultTest, CorruptsOneByteOfSoManyReads) {
  plan->corrupt_items = 1;
  const WorkItem write = item(Op::write);
  std::fill_n(local->data, region_bytes, std::byte{1});
  ASSERT_TRUE(post(write));
  step();
  EXPECT_TRUE(has_arrived());
  EXPECT_EQ(plan->corrupt_items, 1u);

  ASSERT_TRUE(post(item()));
  step();
  EXPECT_EQ(local_bytes_equal_to(1), static_cast<std::ptrdiff_t>(region_bytes) - 1);
  ASSERT_TRUE(post(item()));
  step();
  EXPECT_TRUE(has_arrived());
}

TEST_F(FaultTest, CorruptsInsideTheItemAlone) {
  plan->corrupt_items = 1;
  const std::array<Slice, 2> slices{{{100, 0, 3}, {200, 0, 2}}};
  WorkItem work = item();
  work.slices = {slices.data(), 2, 0, 5};
  ASSERT_TRUE(post(work));
  step();
  EXPECT_EQ(local_bytes_equal_to(1), 4);
  EXPECT_EQ(local_bytes_equal_to(0), static_cast<std::ptrdiff_t>(region_bytes) - 5);
  EXPECT_EQ(local->data[102], std::byte{0xfe});
}

// ---- rails

TEST_F(FaultTest, ARailThatGoesDownBreaksItsChannels) {
  plan->delay_us = 3'600'000'000;
  const WorkItem queued = item();
  ASSERT_TRUE(post(queued));
  plan->rail_down = true;
  EXPECT_FALSE(post(item()));
  EXPECT_EQ(initiator.port->progress(), Progress::runnable);
  step();
  EXPECT_EQ(initiator.events.down.at(channel).code(), Errc::channel_error);
  EXPECT_EQ(outcome(queued), Errc::channel_error);
  EXPECT_TRUE(is_untouched());
  EXPECT_EQ(plan->fences, 0u) << "the caller fenced nothing";
  EXPECT_EQ(initiator.port->progress(), Progress::idle);

  const auto refused = initiator.port->open(spec());
  EXPECT_EQ(refused.status().code(), Errc::unreachable);
  plan->rail_down = false;
  plan->delay_us = 0;
  channel = open();
  const WorkItem again = item();
  ASSERT_TRUE(post(again));
  step();
  EXPECT_EQ(outcome(again), Errc::ok);
}

TEST_F(FaultTest, ASleepingPollerLooksAtThePlanSoon) {
  EXPECT_EQ(initiator.port->progress(), Progress::idle);
  EXPECT_LE(initiator.port->next_wakeup(), Clock::now() + 10ms);
  initiator.port->fence(channel, {Errc::cancelled, "done"});
  step();
  EXPECT_EQ(initiator.port->next_wakeup(), TimePoint::max());
}

TEST_F(FaultTest, ChannelsThatConnectGoDownWithTheRail) {
  const ChannelId connecting = initiator.port->open(spec()).value();
  plan->rail_down = true;
  step();
  EXPECT_TRUE(initiator.events.down.contains(connecting));
  EXPECT_EQ(std::ranges::count(initiator.events.up, connecting), 0);
}

TEST_F(FaultTest, NothingIsTakenBeforeTheChannelIsUp) {
  plan->delay_us = 1;
  channel = initiator.port->open(spec()).value();
  EXPECT_FALSE(post(item()));
}

TEST_F(FaultTest, RefusesSoManyOpens) {
  plan->refuse_opens = 1;
  EXPECT_EQ(initiator.port->open(spec()).status().code(), Errc::unreachable);
  EXPECT_TRUE(initiator.port->open(spec()));
}

TEST_F(FaultTest, ThePeersEndIsReportedThroughTheWrapper) {
  plan->delay_us = 3'600'000'000;
  const WorkItem work = item();
  ASSERT_TRUE(post(work));
  target.port.reset();
  step();
  EXPECT_TRUE(initiator.events.down.contains(channel));
  EXPECT_EQ(outcome(work), Errc::channel_error);
}

// ---- the contract, whatever happens

TEST_F(FaultTest, EveryItemCompletesOnceAndThenKeepsStill) {
  std::mt19937 random(11);
  std::vector<Slice> places;  // one place of local memory per item
  for (std::uint64_t i = 0; i < 2000; ++i) places.push_back({i % region_bytes, 0, 1});
  std::set<std::uint64_t> taken;
  std::size_t next = 0;

  // A byte that changes after its item's completion would count here.
  std::map<std::uint64_t, std::byte> last_seen;
  initiator.when_complete = [&](std::uint64_t cookie, const Status&) {
    last_seen[cookie] = local->data[places[cookie - 1].local_offset];
    taken.erase(cookie);
  };

  const auto misbehave = [&] {
    plan->delay_us = random() % 2 ? 0 : random() % 300;
    plan->completion_delay_us = random() % 2 ? 0 : random() % 300;
    plan->ignore_cancel = random() % 2 == 0;
    if (random() % 8 == 0) plan->refuse_posts = 2;
    if (random() % 8 == 0) plan->fail_items = 2;
    if (random() % 8 == 0) plan->corrupt_items = 2;
    plan->rail_down = random() % 40 == 0;
    control->hold = random() % 3 == 0;
    if (random() % 3 == 0) control->release(1);
  };
  const auto use = [&] {
    if (initiator.events.down.contains(channel) && !plan->rail_down) {
      const auto opened = initiator.port->open(spec());
      if (opened) channel = *opened;
    }
    if (next < places.size()) {
      WorkItem work = item();
      work.slices = {&places[work.cookie - 1], 1, 0, 1};
      if (post(work)) {
        taken.insert(work.cookie);
        ++next;
      } else {
        --last_cookie;
      }
    }
    if (!taken.empty() && random() % 10 == 0) initiator.port->cancel(channel, *taken.begin());
    if (random() % 60 == 0) initiator.port->fence(channel, {Errc::cancelled, "now and then"});
  };

  const TimePoint limit = Clock::now() + 20s;
  while (next < 1000 && Clock::now() < limit) {
    misbehave();
    use();
    initiator.poll();
    target.poll();
  }
  ASSERT_EQ(next, 1000u);
  control->hold = false;
  plan->rail_down = false;
  EXPECT_TRUE(step_until([&] { return taken.empty(); })) << taken.size() << " items never completed";
  EXPECT_EQ(initiator.completions.size(), next);
  EXPECT_EQ(plan->items, next);
  for (const auto& [cookie, seen] : last_seen)
    EXPECT_EQ(local->data[places[cookie - 1].local_offset], seen) << "item " << cookie << " moved after its completion";
}

TEST_F(FaultTest, ThePortsEndQuietensEverything) {
  plan->delay_us = 1;
  ASSERT_TRUE(post(item()));
  control->hold = true;
  plan->delay_us = 0;
  ASSERT_TRUE(post(item()));
  initiator.port.reset();
  control->hold = false;
  std::this_thread::sleep_for(1ms);
  target.poll();
  EXPECT_TRUE(is_untouched());
  EXPECT_EQ(control->ports, 1);
}

}  // namespace
}  // namespace kvferry::test
