// Between a caller and a poller: a cancel reaches a transfer wherever it is (before a poller took it, in
// either of several, on its way from one to another), and a push may come later than its peer's end.
// No rails here, so that nothing ends by itself.
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/poller_core.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

struct NoEvents final : PollerEvents {
  void rail_up(std::uint32_t, std::uint32_t) override {}
  void rail_down(std::uint32_t, std::uint32_t, const Status&) override {}
  void request(const PortRequest&) override {}
  void orphaned(RefPtr<TransferState> transfer, const Status& why) override { transfer->complete(why); }
};

class HandoverTest : public testing::Test {
 protected:
  HandoverTest() {
    peer->set_state(PeerState::up);
    std::vector<std::shared_ptr<Submissions>> all;
    for (std::uint32_t group = 0; group < 2; ++group) {
      all.push_back(std::make_shared<Submissions>([](std::function<void()> task) { task(); }));
      PollerCore::Parts parts;
      parts.group = group;
      parts.groups = 2;
      parts.config = &config;
      parts.peers = &peers;
      parts.notifications = &notifications;
      parts.regions = &regions;
      parts.metrics = &metrics;
      parts.submissions = all.back().get();
      parts.events = &events;
      cores.push_back(std::make_unique<PollerCore>(parts));
    }
    groups = all;
    owner = std::make_shared<SharedOwner>(std::move(all));
  }

  RefPtr<TransferState> transfer() {
    const Slice slice{0, 0, 64};
    auto made = TransferState::create(
        {.deadline = Clock::now() + 30s, .remote = remote, .slices = std::span(&slice, 1), .owner = owner});
    made->peer_slot = peer->slot;
    return made;
  }
  void step(std::size_t group) { cores[group]->step(Clock::now()); }
  static void expect_cancelled(const RefPtr<TransferState>& transfer) {
    ASSERT_TRUE(transfer->done());
    EXPECT_TRUE(transfer->status() == Errc::cancelled) << transfer->status().to_string();
    EXPECT_NE(transfer->status().text().find("read of 64 bytes with peer 'target', region 'kv'"), std::string::npos)
        << transfer->status().text();
  }

  EngineConfig config;
  PeerTable peers{1};
  std::shared_ptr<PeerRecord> peer = peers.find_or_add("target", 2);
  NotificationQueue notifications;
  RegionTable regions;
  MetricCounters metrics;
  NoEvents events;
  std::shared_ptr<const RemoteRegion> remote =
      std::make_shared<const RemoteRegion>(RemoteRegion{{1, 1}, "kv", 4096, MemoryKind::host, Access::read, {}, {}});
  std::vector<std::shared_ptr<Submissions>> groups;
  std::shared_ptr<TransferOwner> owner;
  std::vector<std::unique_ptr<PollerCore>> cores;
};

TEST_F(HandoverTest, CancelEndsATransferInItsOwnPollerOnly) {
  for (const std::size_t carrier : {0u, 1u}) {
    SCOPED_TRACE(carrier);
    const auto running = transfer();
    ASSERT_TRUE(groups[carrier]->push(running));
    step(carrier);
    EXPECT_FALSE(running->done());
    running->cancel();
    step(1 - carrier);
    EXPECT_FALSE(running->done()) << "the other poller must not touch what it does not have";
    step(carrier);
    expect_cancelled(running);
    EXPECT_TRUE(cores[carrier]->idle());
  }
}

TEST_F(HandoverTest, CancelEndsATransferThatNoPollerHasTakenYet) {
  const auto early = transfer();
  early->cancel();
  step(0);
  step(1);
  EXPECT_FALSE(early->done());
  ASSERT_TRUE(groups[1]->push(early));
  step(1);
  expect_cancelled(early);
}

TEST_F(HandoverTest, CancelIsHarmlessOnceTheTransferHasEnded) {
  const auto running = transfer();
  ASSERT_TRUE(groups[1]->push(running));
  step(1);
  running->cancel();
  running->cancel();
  step(1);
  expect_cancelled(running);
  step(0);
  step(1);
  EXPECT_EQ(metrics.transfers_failed, 1u);
}

TEST_F(HandoverTest, NoCancelIsLostWhilePollersRun) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> pollers;
  for (std::size_t group = 0; group < 2; ++group)
    pollers.emplace_back([&, group] {
      while (!stop) step(group);
    });
  std::mt19937 random(5);
  std::vector<RefPtr<TransferState>> running;
  for (int i = 0; i < 3000; ++i) {
    running.push_back(transfer());
    if (!groups[random() % 2]->push(running.back())) ADD_FAILURE() << "refused while open";
    if (random() % 4 == 0) std::this_thread::yield();
    running.back()->cancel();
  }
  for (const auto& transfer : running) EXPECT_TRUE(transfer->wait_until(Clock::now() + 20s, 0us));
  stop = true;
  for (auto& poller : pollers) poller.join();
  for (const auto& transfer : running) expect_cancelled(transfer);
}

TEST_F(HandoverTest, APushAfterThePeersEndIsRefused) {
  for (const PeerState state : {PeerState::lost, PeerState::stale, PeerState::closed}) {
    const auto late = transfer();
    ASSERT_TRUE(groups[0]->push(late));
    peer->set_state(state, {Errc::peer_lost, "it does not answer"});
    cores[0]->close_peer(peer->slot, peer->reason());
    step(0);
    ASSERT_TRUE(late->done()) << "its lane is gone: nobody else would end it before its deadline";
    EXPECT_EQ(late->status().text(), "it does not answer");
  }
}

TEST_F(HandoverTest, APushBeforeTheRailsWaitsForThem) {
  for (const PeerState state : {PeerState::connecting, PeerState::up, PeerState::suspect}) {
    peer->set_state(state);
    const auto early = transfer();
    ASSERT_TRUE(groups[0]->push(early));
    step(0);
    EXPECT_FALSE(early->done());
    early->cancel();
    step(0);
    EXPECT_TRUE(early->done());
  }
}

}  // namespace
}  // namespace kvferry
