// The poller's work, stepped by hand over a transport that moves bytes only when told.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/poller_core.hpp>
#include <kvferry/transports/fault.hpp>

#include "tests/support/memory_transport.hpp"

namespace kvferry {
namespace {

using namespace std::chrono_literals;
using test::make_memory_transport;
using test::MemoryControl;
using test::MemoryOptions;

struct RecordedEvents final : PollerEvents {
  void rail_up(std::uint32_t, std::uint32_t rail) override { up.push_back(rail); }
  void rail_down(std::uint32_t, std::uint32_t rail, const Status& why) override { down.emplace_back(rail, why); }
  void orphaned(RefPtr<TransferState> transfer, const Status& why) override {
    orphans.emplace_back(std::move(transfer), why);
  }
  void request(const PortRequest& request) override { requests.push_back(request); }
  std::vector<PortRequest> requests;
  std::vector<std::uint32_t> up;
  std::vector<std::pair<std::uint32_t, Status>> down;
  std::vector<std::pair<RefPtr<TransferState>, Status>> orphans;
};

/// One engine's worth of parts around one core.
struct Side {
  explicit Side(std::uint64_t incarnation, std::uint32_t groups = 1) : life(incarnation), peers(incarnation) {
    submissions = std::make_shared<Submissions>([](std::function<void()> task) { task(); });
    PollerCore::Parts parts;
    parts.groups = groups;
    parts.config = &config;
    parts.peers = &peers;
    parts.notifications = &notifications;
    parts.regions = &regions;
    parts.metrics = &metrics;
    parts.submissions = submissions.get();
    parts.events = &events;
    core = std::make_unique<PollerCore>(parts);
  }

  Status add(Transport& transport) {
    PortContext context;
    context.regions = &regions;
    context.incarnation = life;
    return core->add_port(transport, context);
  }

  std::shared_ptr<const RegionRecord> region(const std::string& name, std::size_t bytes) {
    memory.push_back(std::make_unique<std::vector<std::byte>>(bytes));
    auto record = std::make_unique<RegionRecord>();
    record->name = name;
    record->data = memory.back()->data();
    record->size = bytes;
    return regions.add(std::move(record)).value();
  }

  const std::uint64_t life;
  EngineConfig config;
  PeerTable peers;
  NotificationQueue notifications;
  RegionTable regions;
  MetricCounters metrics;
  RecordedEvents events;
  std::shared_ptr<Submissions> submissions;
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory;
  std::unique_ptr<PollerCore> core;
};

class PollerCoreTest : public ::testing::Test {
 protected:
  static constexpr std::size_t region_bytes = 1 << 20;

  void SetUp() override { connect(limits()); }

  static PortLimits limits() {
    PortLimits limits;
    limits.item_bytes = 4096;
    limits.item_slices = 4;
    limits.whole_bytes = 1024;
    limits.channel_items = 2;
    return limits;
  }

  void connect(const PortLimits& limits, std::uint32_t groups = 1) {
    initiator = std::make_unique<Side>(1, groups);
    target = std::make_unique<Side>(2);
    control = std::make_shared<MemoryControl>();
    plan = std::make_shared<FaultPlan>();
    transports.clear();
    transports.push_back(make_fault_transport(make_memory_transport({"one", limits, control}), plan, "one"));
    transports.push_back(make_memory_transport({"two", limits, control}));
    for (const auto& transport : transports) {
      ASSERT_TRUE(initiator->add(*transport).is_ok());
      ASSERT_TRUE(target->add(*transport).is_ok());
    }
    local = initiator->region("local", region_bytes);
    const auto record = target->region("kv", region_bytes);
    auto known = std::make_shared<RemoteRegion>();
    known->key = record->key;
    known->name = "kv";
    known->size = record->size;
    known->access = Access::read_write;
    remote = known;
    for (std::size_t i = 0; i < region_bytes; ++i) target_bytes()[i] = static_cast<std::byte>(i * 31 + i / 257);

    peer = initiator->peers.find_or_add("target", 2);
    peer->set_state(PeerState::up);
    token = target->peers.open_session(target->peers.find_or_add("initiator", 1), now);
  }

  void open_rail(std::uint32_t rail, const std::string& transport, std::uint32_t tier = 0) {
    RailSpec spec;
    spec.rail = rail;
    spec.tier = tier;
    spec.transport = transport;
    for (const auto& advert : target->core->adverts())
      if (advert.transport == transport) spec.channel.address = advert.address;
    spec.channel.token = token;
    spec.channel.target_incarnation = 2;
    spec.channel.give_up = now + 1h;
    initiator->core->open_rail(peer->slot, spec);
    run(10);
  }

  void run(int steps, Duration tick = 10us) {
    for (int i = 0; i < steps; ++i) {
      now += tick;
      initiator->core->step(now);
      target->core->step(now);
    }
  }

  /// For the fault plan's delays, which pass in real time.
  void run_for_real(Duration duration) {
    const TimePoint end = Clock::now() + duration;
    while (Clock::now() < end) {
      now = std::max(now, Clock::now());
      initiator->core->step(now);
      target->core->step(now);
      std::this_thread::sleep_for(200us);
    }
  }

  TransferState::Request request(Op op, std::vector<Slice> slices, Duration deadline = 10s) {
    slice_storage.push_back(std::make_unique<std::vector<Slice>>(std::move(slices)));
    TransferState::Request request;
    request.op = op;
    request.deadline = now + deadline;
    request.local = local;
    request.remote = remote;
    request.slices = *slice_storage.back();
    request.owner = initiator->submissions;
    return request;
  }

  RefPtr<TransferState> submit(TransferState::Request wanted) {
    auto state = TransferState::create(std::move(wanted));
    state->peer_slot = peer->slot;
    state->submitted_at = now;
    EXPECT_TRUE(initiator->submissions->push(state));
    return state;
  }

  RefPtr<TransferState> submit(Op op, std::vector<Slice> slices, Duration deadline = 10s) {
    return submit(request(op, std::move(slices), deadline));
  }

  std::byte* local_bytes() { return local->data; }
  std::byte* target_bytes() { return target->memory.front()->data(); }
  bool equal(std::uint64_t offset, std::uint64_t length) {
    return std::memcmp(local_bytes() + offset, target_bytes() + offset, length) == 0;
  }

  TimePoint now = Clock::now();
  std::unique_ptr<Side> target;
  std::unique_ptr<Side> initiator;
  std::shared_ptr<MemoryControl> control;
  std::shared_ptr<FaultPlan> plan;
  std::vector<std::shared_ptr<Transport>> transports;
  std::shared_ptr<const RegionRecord> local;
  std::shared_ptr<const RemoteRegion> remote;
  std::shared_ptr<PeerRecord> peer;
  Token token{};
  std::vector<std::unique_ptr<std::vector<Slice>>> slice_storage;

  void TearDown() override {
    initiator.reset();
    target.reset();
  }
};

std::vector<Slice> scattered(std::size_t count, std::uint64_t length, std::uint64_t stride) {
  std::vector<Slice> slices;
  for (std::size_t i = 0; i < count; ++i) slices.push_back({i * stride, i * stride, length});
  return slices;
}

TEST_F(PollerCoreTest, ReadsScatteredSlicesOverOneRail) {
  open_rail(1, "one");
  ASSERT_EQ(initiator->events.up, std::vector<std::uint32_t>{1});
  const auto transfer = submit(Op::read, scattered(100, 300, 1000));
  run(200);
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
  for (std::size_t i = 0; i < 100; ++i) EXPECT_TRUE(equal(i * 1000, 300)) << i;
  EXPECT_EQ(local_bytes()[300], std::byte{0}) << "bytes between the slices must stay";
  EXPECT_TRUE(initiator->core->idle());
}

TEST_F(PollerCoreTest, LargeSlicesAreCutAndSpreadOverRailsOfOneTier) {
  open_rail(1, "one");
  open_rail(2, "two");
  const auto transfer = submit(Op::read, {{0, 0, 64 * 1024}});
  run(200);
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(equal(0, 64 * 1024));
  EXPECT_EQ(initiator->metrics.items_posted.load(), 16u);
  EXPECT_GT(plan->items.load(), 0u) << "the first rail carries a share";
  EXPECT_LT(plan->items.load(), 16u) << "and the second one too";
}

TEST_F(PollerCoreTest, SmallTransfersAreCutIntoOneItemForEachThatRunsBesideTheOthers) {
  PortLimits four = limits();
  four.side_by_side = 4;
  four.channel_items = 64;
  connect(four);
  open_rail(1, "one");
  const std::vector<std::pair<std::uint64_t, std::uint64_t>> bytes_and_items = {
      {2048, 1}, {4 * 4096, 4}, {4 * 4096 + 1, 4}, {40'000, 4}, {4 * 4 * 4096, 4}, {4 * 4 * 4096 + 4096, 17}};
  for (const auto& [bytes, items] : bytes_and_items) {
    const std::uint64_t before = initiator->metrics.items_posted.load();
    const auto transfer = submit(Op::read, {{0, 0, bytes}});
    run(200);
    ASSERT_TRUE(transfer->done());
    EXPECT_TRUE(transfer->status().is_ok());
    EXPECT_TRUE(equal(0, bytes));
    EXPECT_EQ(initiator->metrics.items_posted.load() - before, items) << bytes << " bytes";
  }
}

TEST_F(PollerCoreTest, ABetterTierCarriesAllUntilItBreaks) {
  open_rail(1, "one", 0);
  open_rail(2, "two", 1);
  auto transfer = submit(Op::read, {{0, 0, 32 * 1024}});
  run(200);
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(plan->items.load(), 8u);
  plan->rail_down = true;
  run(10);
  ASSERT_EQ(initiator->events.down.size(), 1u);
  transfer = submit(Op::read, {{64 * 1024, 64 * 1024, 32 * 1024}});
  run(200);
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(transfer->status().is_ok());
  EXPECT_TRUE(equal(64 * 1024, 32 * 1024));
}

TEST_F(PollerCoreTest, ItemsOfABrokenRailAreRetriedExactlyOnceElsewhere) {
  open_rail(1, "one");
  open_rail(2, "two");
  control->hold = true;
  const auto transfer = submit(Op::write, {{0, 0, 64 * 1024}});
  std::memset(local_bytes(), 0x5a, 64 * 1024);
  run(5);
  plan->rail_down = true;
  run(5);
  control->hold = false;
  run(300);
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
  EXPECT_TRUE(equal(0, 64 * 1024));
  EXPECT_GT(initiator->metrics.items_retried.load(), 0u);
}

TEST_F(PollerCoreTest, AChannelThatBreaksIsOneFailureHoweverManyItemsItHad) {
  auto wide = limits();
  wide.channel_items = 64;
  connect(wide);
  open_rail(1, "one", 0);
  open_rail(2, "two", 1);
  control->hold = true;
  const auto transfer = submit(Op::write, {{0, 0, 32 * 4096}});
  std::memset(local_bytes(), 0x5a, 32 * 4096);
  run(5);
  plan->rail_down = true;
  run(5);
  control->hold = false;
  run(300);
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
  EXPECT_TRUE(equal(0, 32 * 4096));
  EXPECT_EQ(initiator->metrics.items_retried.load(), 32u);
}

TEST_F(PollerCoreTest, APeerConnectedAgainBeforeItsEndHasDrainedGetsItsRails) {
  open_rail(1, "one");
  control->hold = true;
  const auto former = submit(Op::read, {{0, 0, 4096}});
  run(3);
  initiator->core->close_peer(peer->slot, {Errc::cancelled, "disconnected"});
  open_rail(2, "two");
  control->hold = false;
  run(20);
  ASSERT_TRUE(former->done());
  EXPECT_EQ(former->status().code(), Errc::cancelled) << former->status().to_string();
  EXPECT_EQ(initiator->events.up, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_TRUE(initiator->events.down.empty());
  const auto next = submit(Op::read, {{0, 0, 4096}});
  run(20);
  ASSERT_TRUE(next->done());
  EXPECT_TRUE(next->status().is_ok()) << next->status().to_string();
}

TEST_F(PollerCoreTest, APeerGivenUpAgainGetsNoRails) {
  open_rail(1, "one");
  initiator->core->close_peer(peer->slot, {Errc::peer_lost, "gone"});
  RailSpec again;
  again.rail = 2;
  again.transport = "two";
  initiator->core->open_rail(peer->slot, again);
  initiator->core->close_peer(peer->slot, {Errc::peer_lost, "gone again"});
  run(20);
  EXPECT_EQ(initiator->events.up, std::vector<std::uint32_t>{1});
  EXPECT_TRUE(initiator->events.down.empty());
}

TEST_F(PollerCoreTest, AnItemThatKeepsFailingEndsTheTransferNamingTheCause) {
  open_rail(1, "one");
  plan->fail_items = 1000;
  const auto transfer = submit(Op::read, {{0, 0, 100}});
  run(100);
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::channel_error);
  EXPECT_NE(transfer->status().text().find("'kv'"), std::string_view::npos) << transfer->status().text();
  EXPECT_NE(transfer->status().text().find("'target'"), std::string_view::npos) << transfer->status().text();
}

TEST_F(PollerCoreTest, WithoutARailTheTransferWaitsForOneAndThenForItsDeadline) {
  auto transfer = submit(Op::read, {{0, 0, 100}}, 50ms);
  run(100, 100us);
  EXPECT_FALSE(transfer->done());
  open_rail(1, "one");
  run(10);
  EXPECT_TRUE(transfer->done());
  plan->rail_down = true;
  run(10);
  transfer = submit(Op::read, {{0, 0, 100}}, 50ms);
  run(60, 1ms);
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::timed_out);
}

TEST_F(PollerCoreTest, RefusedPostsAreOfferedAgain) {
  open_rail(1, "one");
  plan->refuse_posts = 20;
  const auto transfer = submit(Op::read, scattered(10, 300, 1000));
  run(300, 50us);
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(transfer->status().is_ok());
  for (std::size_t i = 0; i < 10; ++i) EXPECT_TRUE(equal(i * 1000, 300));
}

// The order in which transfers end while one item at a time is let go.
std::vector<int> finishing_order(const std::vector<RefPtr<TransferState>>& transfers, std::vector<int> seen) {
  for (std::size_t i = 0; i < transfers.size(); ++i)
    if (transfers[i]->done() && std::find(seen.begin(), seen.end(), static_cast<int>(i)) == seen.end())
      seen.push_back(static_cast<int>(i));
  return seen;
}

TEST_F(PollerCoreTest, ClassesGoBeforeDeadlinesAndDeadlinesBeforeArrival) {
  open_rail(1, "two");
  control->hold = true;
  const auto blocker = submit(Op::read, {{0, 0, 8192}});  // fills both places of the channel
  run(3);
  std::vector<RefPtr<TransferState>> transfers;
  const auto add = [&](Priority priority, Duration deadline) {
    auto wanted = request(Op::read, {{0, 0, 100}}, deadline);
    wanted.priority = priority;
    transfers.push_back(submit(std::move(wanted)));
  };
  add(Priority::background, 1s);
  add(Priority::normal, 9s);
  add(Priority::normal, 3s);
  add(Priority::critical, 8s);
  run(3);
  std::vector<int> order;
  for (int i = 0; i < 10; ++i) {
    control->release(1);
    run(3);
    order = finishing_order(transfers, order);
  }
  EXPECT_EQ(order, (std::vector<int>{3, 2, 1, 0}));
  EXPECT_TRUE(blocker->done());
}

TEST_F(PollerCoreTest, BackgroundWorkDoesNotStarve) {
  open_rail(1, "two");
  auto wanted = request(Op::read, {{0, 0, 100}});
  wanted.priority = Priority::background;
  const auto background = submit(std::move(wanted));
  control->hold = true;
  std::vector<RefPtr<TransferState>> flood;
  for (int i = 0; i < 200; ++i) {
    auto critical = request(Op::read, {{0, 0, 100}});
    critical.priority = Priority::critical;
    flood.push_back(submit(std::move(critical)));
  }
  std::size_t released = 0;
  while (!background->done() && released < 200) {
    control->release(1);
    ++released;
    run(2);
  }
  EXPECT_TRUE(background->done());
  EXPECT_LT(released, 60u);
  control->hold = false;
  run(400);
}

TEST_F(PollerCoreTest, ADeadlineEndsTheTransferOnlyOnceItsBytesAreQuiet) {
  open_rail(1, "one");
  plan->delay_us = 500'000;
  plan->ignore_cancel = true;
  std::memset(local_bytes(), 0xee, 4096);
  const auto transfer = submit(Op::read, {{0, 0, 4096}}, 50ms);
  run(49, 1ms);
  EXPECT_FALSE(transfer->done());
  int waited = 49;
  while (!transfer->done() && waited < 300) run(1, 1ms), ++waited;
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::timed_out);
  EXPECT_LT(waited, 150) << "drain_grace is 50 ms, and the fence is immediate";
  EXPECT_EQ(plan->fences.load(), 1u);
  run_for_real(600ms);
  for (std::size_t i = 0; i < 4096; ++i) ASSERT_EQ(local_bytes()[i], std::byte{0xee}) << i;
}

TEST_F(PollerCoreTest, ACancelledTransferEndsWithoutAFenceWhenTheTransportCanStopIt) {
  open_rail(1, "one");
  plan->delay_us = 500'000;
  std::memset(local_bytes(), 0xee, 8192);
  const auto transfer = submit(Op::read, {{0, 0, 8192}});
  run(10, 1ms);
  EXPECT_FALSE(transfer->done());
  transfer->cancel();
  run(5, 1ms);
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::cancelled);
  EXPECT_EQ(plan->fences.load(), 0u);
  run_for_real(600ms);
  for (std::size_t i = 0; i < 8192; ++i) ASSERT_EQ(local_bytes()[i], std::byte{0xee}) << i;
}

TEST_F(PollerCoreTest, ACancelBeforeThePollerHasSeenTheTransferIsNotLost) {
  open_rail(1, "one");
  control->hold = true;
  const auto transfer = submit(Op::read, {{0, 0, 100}});
  transfer->cancel();
  run(100, 2ms);
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::cancelled);
}

TEST_F(PollerCoreTest, TheImmediateFollowsAllDataAndComesOnce) {
  open_rail(1, "one");
  open_rail(2, "two");
  std::memset(local_bytes(), 0x11, 64 * 1024);
  control->hold = true;
  auto wanted = request(Op::write_imm, {{0, 0, 64 * 1024}});
  wanted.immediate = 42;
  const auto transfer = submit(std::move(wanted));
  for (int i = 0; i < 16; ++i) {
    run(3);
    EXPECT_FALSE(target->notifications.pop(Duration::zero()).has_value()) << "before all data is there";
    control->release(1);
  }
  control->hold = false;
  run(100);
  ASSERT_TRUE(transfer->done());
  const auto notification = target->notifications.pop(Duration::zero());
  ASSERT_TRUE(notification.has_value());
  EXPECT_EQ(notification->immediate, 42u);
  EXPECT_EQ(notification->peer, "initiator");
  EXPECT_TRUE(equal(0, 64 * 1024));
  EXPECT_FALSE(target->notifications.pop(Duration::zero()).has_value());
}

TEST_F(PollerCoreTest, AnImmediateWithoutDataIsANotification) {
  open_rail(1, "one");
  auto wanted = request(Op::write_imm, {});
  wanted.immediate = 7;
  const auto transfer = submit(std::move(wanted));
  run(20);
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(transfer->status().is_ok());
  EXPECT_EQ(target->notifications.pop(Duration::zero())->immediate, 7u);
}

RefPtr<TransferState> make_message(const std::shared_ptr<Submissions>& owner, std::string_view text,
                                   TimePoint deadline) {
  TransferState::Request request;
  request.op = Op::send;
  request.deadline = deadline;
  request.message = std::as_bytes(std::span(text.data(), text.size()));
  request.owner = owner;
  return TransferState::create(std::move(request));
}

TEST_F(PollerCoreTest, MessagesArriveInOrderEvenWhenTheirRailBreaks) {
  open_rail(1, "one");
  open_rail(2, "two");
  std::vector<RefPtr<TransferState>> sends;
  for (int i = 0; i < 40; ++i) {
    sends.push_back(make_message(initiator->submissions, std::to_string(i), now + 10s));
    sends.back()->peer_slot = peer->slot;
    ASSERT_TRUE(initiator->submissions->push(sends.back()));
    if (i == 20) run(2);
    if (i == 25) plan->rail_down = true;
  }
  run(300);
  for (const auto& send : sends) EXPECT_TRUE(send->done() && send->status().is_ok());
  auto& box = target->peers.find_life(1)->messages;
  for (int i = 0; i < 40; ++i) {
    std::array<std::byte, 16> buffer;
    const auto size = box.take(buffer);
    ASSERT_TRUE(size.has_value()) << i;
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(buffer.data()), *size), std::to_string(i));
  }
  EXPECT_TRUE(box.empty());
}

TEST_F(PollerCoreTest, AReceiveWaitsForItsMessageOrItsDeadline) {
  open_rail(1, "one");
  const auto back = target->peers.find_life(1);
  std::array<std::byte, 8> buffer{};
  const auto receive = [&](std::span<std::byte> into, Duration limit) {
    TransferState::Request wanted;
    wanted.op = Op::recv;
    wanted.deadline = now + limit;
    wanted.owner = target->submissions;
    auto state = TransferState::create(std::move(wanted));
    state->receive_buffer = into;
    state->peer_slot = back->slot;
    EXPECT_TRUE(target->submissions->push(state));
    return state;
  };
  const auto late = receive(buffer, 10ms);
  run(20, 1ms);
  ASSERT_TRUE(late->done());
  EXPECT_EQ(late->status().code(), Errc::timed_out);

  const auto small = receive(std::span(buffer).first(2), 1s);
  const auto fitting = receive(buffer, 1s);
  const auto send = make_message(initiator->submissions, "hello", now + 1s);
  send->peer_slot = peer->slot;
  ASSERT_TRUE(initiator->submissions->push(send));
  run(50);
  ASSERT_TRUE(small->done());
  EXPECT_EQ(small->status().code(), Errc::too_large);
  ASSERT_TRUE(fitting->done());
  EXPECT_EQ(fitting->bytes(), 5u);
  EXPECT_EQ(std::memcmp(buffer.data(), "hello", 5), 0);
}

TEST_F(PollerCoreTest, AWithdrawnLocalRegionEndsItsTransfersAndThenIsFree) {
  open_rail(1, "one");
  control->hold = true;
  const auto transfer = submit(Op::read, {{0, 0, 4096}});
  run(5);
  ASSERT_TRUE(initiator->regions.retire(local->key).is_ok());
  bool released = false;
  initiator->core->release_region(local->key, now, [&] { released = true; });
  run(200, 1ms);
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::cancelled);
  EXPECT_TRUE(released);
  const auto late = submit(Op::read, {{0, 0, 1}});
  run(5);
  ASSERT_TRUE(late->done());
  EXPECT_EQ(late->status().code(), Errc::cancelled);
}

TEST_F(PollerCoreTest, AWithdrawnRemoteRegionIsRefusedByName) {
  open_rail(1, "one");
  ASSERT_TRUE(target->regions.retire(remote->key).is_ok());
  bool released = false;
  target->core->release_region(remote->key, now, [&] { released = true; });
  run(5);
  EXPECT_TRUE(released);
  const auto transfer = submit(Op::read, {{0, 0, 1}});
  run(20);
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::unknown_region);
}

TEST_F(PollerCoreTest, ALostPeerEndsAllItsTransfersWithTheReason) {
  open_rail(1, "one");
  control->hold = true;
  std::vector<RefPtr<TransferState>> transfers;
  for (int i = 0; i < 50; ++i) transfers.push_back(submit(Op::write, {{0, 0, 4096}}));
  run(5);
  initiator->core->close_peer(peer->slot, {Errc::peer_lost, "gone"});
  run(100, 1ms);
  for (const auto& transfer : transfers) {
    ASSERT_TRUE(transfer->done());
    EXPECT_EQ(transfer->status().code(), Errc::peer_lost);
  }
  const auto late = submit(Op::read, {{0, 0, 1}});
  initiator->peers.remove(peer->slot);
  run(5);
  ASSERT_TRUE(late->done());
  EXPECT_EQ(late->status().code(), Errc::peer_lost);
}

TEST_F(PollerCoreTest, StoppingEndsEverythingAndRefusesTheRest) {
  open_rail(1, "one");
  control->hold = true;
  std::vector<RefPtr<TransferState>> transfers;
  for (int i = 0; i < 1000; ++i) transfers.push_back(submit(Op::write, {{0, 0, 4096}}));
  run(2);
  initiator->core->stop({Errc::shutting_down, "end"});
  run(100, 1ms);
  EXPECT_TRUE(initiator->core->idle());
  for (const auto& transfer : transfers) {
    ASSERT_TRUE(transfer->done());
    EXPECT_EQ(transfer->status().code(), Errc::shutting_down);
  }
  const auto late = submit(Op::read, {{0, 0, 1}});
  initiator->core.reset();
  EXPECT_TRUE(late->done());
  EXPECT_FALSE(initiator->submissions->push(late));
}

TEST_F(PollerCoreTest, DestroyingABusyCoreEndsItsTransfersQuietly) {
  open_rail(1, "one");
  control->hold = true;
  const auto transfer = submit(Op::read, {{0, 0, 64 * 1024}});
  run(5);
  initiator->core.reset();
  ASSERT_TRUE(transfer->done());
  EXPECT_EQ(transfer->status().code(), Errc::shutting_down);
  control->hold = false;
  for (int i = 0; i < 50; ++i) target->core->step(now += 1ms);
  for (std::size_t i = 0; i < 64 * 1024; ++i) ASSERT_EQ(local_bytes()[i], std::byte{0}) << i;
}

TEST_F(PollerCoreTest, WithAnotherGroupUpATransferWithoutRailsIsHandedBack) {
  connect(limits(), 2);
  auto route = std::make_shared<Route>();
  route->groups = {1};
  peer->set_route(route);
  const auto transfer = submit(Op::read, {{0, 0, 100}});
  run(5);
  ASSERT_EQ(initiator->events.orphans.size(), 1u);
  EXPECT_EQ(initiator->events.orphans.front().first, transfer);
  EXPECT_FALSE(transfer->done());
  EXPECT_TRUE(initiator->core->idle());
  transfer->complete({Errc::no_path, "end of test"});
}

TEST_F(PollerCoreTest, MemoryInFlightIsBoundedByTheRailsNotByTheTransfers) {
  open_rail(1, "one");
  control->hold = true;
  for (int i = 0; i < 500; ++i) static_cast<void>(submit(Op::read, {{0, 0, 64 * 1024}}));
  run(10);
  EXPECT_LE(initiator->metrics.items_posted.load(), limits().channel_items);
  control->hold = false;
  run(6000);
  EXPECT_TRUE(initiator->core->idle());
}

}  // namespace
}  // namespace kvferry
