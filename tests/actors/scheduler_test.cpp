#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/scheduler.hpp>
#include <kvferry/actors/split_transfer.hpp>

#include "tests/actors/stage.hpp"

namespace kvferry {
namespace {

using namespace std::chrono_literals;

using PollerProbe = test::Probe<OpenRail, ClosePeer>;
using EndpointProbe = test::Probe<RailsChanged>;

class SchedulerTest : public testing::Test {
 protected:
  static constexpr std::size_t group_count = 3;

  SchedulerTest() {
    SetGroups set;
    for (std::size_t i = 0; i < group_count; ++i) {
      opened.push_back(std::make_shared<PollerProbe::Log>());
      submissions.push_back(std::make_shared<Submissions>([](std::function<void()> task) { task(); }));
      set.groups.push_back({stage.spawn<PollerProbe>(opened.back()), submissions.back()});
    }
    endpoint = stage.spawn<EndpointProbe>(told);
    stage.send(scheduler, std::move(set));
  }
  ~SchedulerTest() override {
    for (const auto& group : submissions) drain(group->close());
  }

  static std::vector<RefPtr<TransferState>> drain(TransferState* list) {
    std::vector<RefPtr<TransferState>> taken;
    while (list) taken.emplace_back(std::exchange(list, list->next), true);
    return taken;
  }

  static RailPlan plan(std::uint32_t group, std::string transport, std::uint32_t tier = 0) {
    RailPlan made;
    made.group = group;
    made.spec.tier = tier;
    made.spec.transport = std::move(transport);
    return made;
  }
  void add_peer(std::vector<RailPlan> rails) { stage.send(scheduler, AddPeer{peer, std::move(rails), endpoint}); }
  /// The numbers of the rails that were opened last, one per plan of add_peer.
  std::uint32_t rail(std::size_t group, std::size_t nth = 0) const {
    return opened[group]->of<OpenRail>().at(nth).spec.rail;
  }
  void up(std::uint32_t group, std::uint32_t rail) {
    stage.send(scheduler, RailReport{group, peer->slot, rail, true, {}});
  }
  void down(std::uint32_t group, std::uint32_t rail, Status why = {Errc::channel_error, "it broke"}) {
    stage.send(scheduler, RailReport{group, peer->slot, rail, false, std::move(why)});
  }
  RailsChanged last_told() const { return told->of<RailsChanged>().back(); }
  std::size_t opens(std::size_t group) const { return opened[group]->of<OpenRail>().size(); }

  RefPtr<TransferState> transfer(const std::vector<Slice>& slices, std::shared_ptr<TransferOwner> owner = {}) {
    auto made = TransferState::create({.deadline = stage.now() + 30s, .slices = slices, .owner = std::move(owner)});
    made->peer_slot = peer->slot;
    made->backlog = made->bytes();
    return made;
  }

  test::Stage stage;
  PeerTable peers{1};
  PeerPtr peer = peers.find_or_add("decode-0", 5);
  std::vector<std::shared_ptr<PollerProbe::Log>> opened;
  std::vector<std::shared_ptr<Submissions>> submissions;
  std::shared_ptr<EndpointProbe::Log> told = std::make_shared<EndpointProbe::Log>();
  caf::actor endpoint;
  caf::actor scheduler = stage.spawn<SchedulerActor>(Duration(5s));
};

// ---------------------------------------------------------------- rails and routes

TEST_F(SchedulerTest, OpensEveryRailInItsGroup) {
  add_peer({plan(0, "shm"), plan(1, "shm"), plan(0, "tcp", 1)});
  ASSERT_EQ(opens(0), 2u);
  ASSERT_EQ(opens(1), 1u);
  EXPECT_EQ(opens(2), 0u);
  const auto first = opened[0]->of<OpenRail>()[0];
  const auto third = opened[0]->of<OpenRail>()[1];
  EXPECT_EQ(first.peer, peer->slot);
  EXPECT_EQ(first.spec.transport, "shm");
  EXPECT_EQ(first.spec.channel.give_up, stage.now() + 5s) << "no opening lasts for ever";
  EXPECT_EQ(third.spec.transport, "tcp");
  EXPECT_EQ(third.spec.tier, 1u);
  EXPECT_NE(first.spec.rail, third.spec.rail);
  EXPECT_NE(first.spec.rail, rail(1));
  EXPECT_FALSE(last_told().up);
  EXPECT_FALSE(last_told().settled);
  ASSERT_NE(peer->route(), nullptr);
  EXPECT_TRUE(peer->route()->groups.empty());
}

TEST_F(SchedulerTest, PublishesTheGroupsWhoseRailsAreUp) {
  add_peer({plan(0, "shm"), plan(1, "shm"), plan(1, "tcp", 1)});
  up(1, rail(1, 1));
  EXPECT_EQ(peer->route()->groups, std::vector<std::uint32_t>{1});
  EXPECT_EQ(peer->route()->text, "tcp");
  EXPECT_TRUE(last_told().up);
  EXPECT_EQ(last_told().peer, peer->slot);
  up(0, rail(0));
  up(1, rail(1, 0));
  EXPECT_EQ(peer->route()->groups, (std::vector<std::uint32_t>{0, 1})) << "each group once";
  EXPECT_EQ(peer->route()->text, "shm, tcp");
  const auto held = peer->route();
  down(0, rail(0));
  EXPECT_EQ(peer->route()->groups, std::vector<std::uint32_t>{1});
  EXPECT_EQ(held->groups.size(), 2u) << "a snapshot that somebody holds does not change";
  EXPECT_TRUE(last_told().up);
}

TEST_F(SchedulerTest, SettlesOnceNoBetterRailIsPending) {
  add_peer({plan(0, "shm", 0), plan(1, "shm", 0), plan(2, "tcp", 1)});
  up(2, rail(2));
  EXPECT_FALSE(last_told().settled) << "shm, which is better, has not answered";
  down(0, rail(0));
  EXPECT_FALSE(last_told().settled);
  up(1, rail(1));
  EXPECT_TRUE(last_told().settled);
}

TEST_F(SchedulerTest, WorseRailsKeepNobodyWaiting) {
  add_peer({plan(0, "shm", 0), plan(1, "tcp", 1)});
  up(0, rail(0));
  EXPECT_TRUE(last_told().settled);
}

TEST_F(SchedulerTest, SaysWhyNoRailIsUp) {
  add_peer({plan(0, "shm"), plan(1, "tcp", 1)});
  down(0, rail(0), {Errc::no_path, "no shared memory"});
  EXPECT_FALSE(last_told().settled);
  down(1, rail(1), {Errc::unreachable, "port 1234 is closed"});
  EXPECT_TRUE(last_told().settled);
  EXPECT_FALSE(last_told().up);
  const Status why = last_told().why;
  EXPECT_TRUE(why == Errc::no_path) << why.to_string();
  EXPECT_EQ(why.text(), "no rail to peer 'decode-0' is up (shm: no shared memory; tcp: port 1234 is closed)");
}

TEST_F(SchedulerTest, PassesOnThatThePeerRefuses) {
  for (const Errc code : {Errc::stale_peer, Errc::access_denied, Errc::version_mismatch}) {
    add_peer({plan(0, "tcp")});
    down(0, rail(0), {code, "no"});
    EXPECT_TRUE(last_told().why == code) << last_told().why.to_string();
  }
}

TEST_F(SchedulerTest, IgnoresReportsOfWhatItDoesNotKnow) {
  add_peer({plan(0, "tcp")});
  told->clear();
  stage.send(scheduler, RailReport{0, peer->slot + 1, rail(0), true, {}});
  stage.send(scheduler, RailReport{0, peer->slot, rail(0) + 1, true, {}});
  stage.send(scheduler, ReopenRail{peer->slot + 1, rail(0)});
  stage.send(scheduler, ReopenRail{peer->slot, rail(0) + 1});
  EXPECT_TRUE(told->all().empty());
  EXPECT_EQ(opens(0), 1u);
}

// ---------------------------------------------------------------- cool-down

TEST_F(SchedulerTest, RestsTwiceAsLongAfterEveryFailureUpToALimit) {
  add_peer({plan(0, "tcp")});
  const auto number = rail(0);
  std::size_t expected = 1;
  for (const auto rest : {100ms, 200ms, 400ms, 800ms, 1600ms, 3200ms, 5000ms, 5000ms}) {
    SCOPED_TRACE(rest.count());
    down(0, number);
    stage.advance(rest - 10ms);
    EXPECT_EQ(opens(0), expected) << "too early";
    stage.advance(10ms);
    ASSERT_EQ(opens(0), ++expected);
    const auto again = opened[0]->of<OpenRail>().back();
    EXPECT_EQ(again.spec.rail, number) << "the same rail, not a new one";
    EXPECT_EQ(again.spec.channel.give_up, stage.now() + 5s);
  }
  up(0, number);
  EXPECT_EQ(peer->route()->groups.size(), 1u);
}

TEST_F(SchedulerTest, ARailThatWorkedForLongStartsOver) {
  add_peer({plan(0, "tcp")});
  const auto number = rail(0);
  for (const auto rest : {100ms, 200ms, 400ms}) {
    down(0, number);
    stage.advance(rest);
  }
  up(0, number);
  stage.advance(1s);
  down(0, number);
  stage.advance(790ms);
  EXPECT_EQ(opens(0), 4u) << "one second was not long: 800 ms of rest";
  stage.advance(10ms);
  EXPECT_EQ(opens(0), 5u);
  up(0, number);
  stage.advance(5010ms);
  down(0, number);
  stage.advance(100ms);
  EXPECT_EQ(opens(0), 6u);
}

TEST_F(SchedulerTest, RepeatedReportsOfOneFailureScheduleOneAttempt) {
  add_peer({plan(0, "tcp")});
  down(0, rail(0));
  down(0, rail(0));
  down(0, rail(0));
  stage.advance(10s);
  EXPECT_EQ(opens(0), 2u);
}

// ---------------------------------------------------------------- the same life again, and the end

TEST_F(SchedulerTest, ARenewedHandshakeReopensWhatIsDownWithTheNewToken) {
  add_peer({plan(0, "shm"), plan(1, "tcp", 1)});
  const auto shm = rail(0);
  const auto tcp = rail(1);
  up(0, shm);
  down(1, tcp);
  auto renewed = std::vector{plan(0, "shm"), plan(1, "tcp", 1)};
  for (auto& each : renewed) each.spec.channel.token[0] = std::byte{9};
  add_peer(renewed);
  EXPECT_EQ(opens(0), 1u) << "what is up stays up";
  ASSERT_EQ(opens(1), 2u);
  EXPECT_EQ(rail(1, 1), tcp);
  EXPECT_EQ(opened[1]->of<OpenRail>()[1].spec.channel.token[0], std::byte{9});
  EXPECT_TRUE(last_told().up);
  // The shm rail too has the new token for its next opening.
  down(0, shm);
  stage.advance(100ms);
  ASSERT_EQ(opens(0), 2u);
  EXPECT_EQ(opened[0]->of<OpenRail>()[1].spec.channel.token[0], std::byte{9});
}

// Otherwise the failures from before the handshake would end it before its rails had a chance.
TEST_F(SchedulerTest, ARenewedHandshakeIsSettledOnlyByItsOwnAttempts) {
  add_peer({plan(0, "tcp")});
  up(0, rail(0));
  down(0, rail(0));
  EXPECT_TRUE(last_told().settled);
  add_peer({plan(0, "tcp")});
  EXPECT_FALSE(last_told().settled);
  up(0, rail(0));
  EXPECT_TRUE(last_told().up);
  EXPECT_TRUE(last_told().settled);
}

TEST_F(SchedulerTest, RemovingAPeerClosesItEverywhere) {
  add_peer({plan(0, "tcp"), plan(1, "tcp")});
  const auto number = rail(0);
  up(0, number);
  down(1, rail(1));
  stage.send(scheduler, RemovePeer{peer->slot, {Errc::peer_lost, "it does not answer"}});
  for (const auto& group : opened) {
    const auto closes = group->of<ClosePeer>();
    ASSERT_EQ(closes.size(), 1u);
    EXPECT_EQ(closes[0].peer, peer->slot);
    EXPECT_TRUE(closes[0].why == Errc::peer_lost);
  }
  EXPECT_EQ(peer->route(), nullptr);
  told->clear();
  up(0, number);
  stage.advance(10s);
  EXPECT_TRUE(told->all().empty()) << "nobody is told of a peer that is gone";
  EXPECT_EQ(opens(0) + opens(1), 2u) << "nothing is opened again";
  EXPECT_EQ(peer->route(), nullptr);
}

TEST_F(SchedulerTest, RemovingAnUnknownPeerStillClosesItsWork) {
  stage.send(scheduler, RemovePeer{99, {Errc::peer_lost, "gone"}});
  for (const auto& group : opened) EXPECT_EQ(group->of<ClosePeer>().size(), 1u);
}

// ---------------------------------------------------------------- transfers of several groups

TEST_F(SchedulerTest, PicksTheGroupWithTheLeastWork) {
  EXPECT_EQ(pick_group(*peer), std::nullopt);
  peer->set_route(std::make_shared<Route>());
  EXPECT_EQ(pick_group(*peer), std::nullopt);
  peer->set_route(std::make_shared<Route>(Route{{0, 2}, "tcp"}));
  peer->backlog[0] = 10;
  peer->backlog[1] = 0;
  peer->backlog[2] = 5;
  EXPECT_EQ(pick_group(*peer), 2u) << "group 1 has less work, but no rail";
  peer->backlog[2] = 11;
  EXPECT_EQ(pick_group(*peer), 0u);
}

TEST_F(SchedulerTest, AnOrphanGoesToAGroupWithARail) {
  add_peer({plan(0, "tcp"), plan(1, "tcp"), plan(2, "tcp")});
  up(1, rail(1));
  up(2, rail(2));
  peer->backlog[1] = 1000;
  const auto orphan = transfer({{0, 0, 100}});
  stage.send(scheduler, Orphan{0, orphan, {Errc::channel_error, "its rail broke"}});
  EXPECT_FALSE(orphan->done());
  EXPECT_EQ(drain(submissions[2]->take()), std::vector{orphan});
  EXPECT_EQ(peer->backlog[2], 100u);
  EXPECT_EQ(peer->backlog[1], 1000u);
}

TEST_F(SchedulerTest, AnOrphanWithoutAnyRailWaitsInItsOwnGroup) {
  add_peer({plan(0, "tcp"), plan(1, "tcp")});
  const auto orphan = transfer({{0, 0, 100}});
  stage.send(scheduler, Orphan{1, orphan, {Errc::channel_error, "its rail broke"}});
  EXPECT_EQ(drain(submissions[1]->take()), std::vector{orphan});
  EXPECT_FALSE(orphan->done());
}

TEST_F(SchedulerTest, AnOrphanThatNobodyCanTakeEnds) {
  const auto unknown = transfer({{0, 0, 100}});
  stage.send(scheduler, Orphan{0, unknown, {Errc::channel_error, "its rail broke"}});
  ASSERT_TRUE(unknown->done());
  EXPECT_EQ(unknown->status().text(), "its rail broke");

  add_peer({plan(1, "tcp")});
  up(1, rail(1));
  EXPECT_EQ(submissions[1]->close(), nullptr);
  const auto late = transfer({{0, 0, 100}});
  stage.send(scheduler, Orphan{0, late, {Errc::channel_error, "its rail broke"}});
  ASSERT_TRUE(late->done());
  EXPECT_TRUE(late->status() == Errc::channel_error);
}

class SplitTest : public SchedulerTest {
 protected:
  void SetUp() override {
    add_peer({plan(0, "tcp"), plan(1, "tcp"), plan(2, "tcp")});
    for (std::uint32_t group : {0u, 1u, 2u}) up(group, rail(group));
    base = std::make_shared<SharedOwner>(submissions);
    owner = std::make_shared<SplitOwner>(base);
    whole = transfer({{0, 4096, 200}, {500, 9000, 100}}, owner);
    whole->on_complete([this](const Status&) { ++ends; }, Dispatch::in_place);
  }
  void split() { stage.send(scheduler, SplitTransfer{whole, peer}); }
  std::vector<RefPtr<TransferState>> taken() {
    std::vector<RefPtr<TransferState>> all;
    for (const auto& group : submissions)
      for (auto& part : drain(group->take())) all.push_back(std::move(part));
    handed_out.insert(handed_out.end(), all.begin(), all.end());
    return all;
  }
  // As an engine does: parts that nobody ends would hold each other for ever.
  void TearDown() override {
    taken();
    for (const auto& part : handed_out)
      if (!part->done()) part->complete({Errc::shutting_down, "the test is over"});
  }

  std::vector<RefPtr<TransferState>> handed_out;
  std::shared_ptr<SharedOwner> base;
  std::shared_ptr<SplitOwner> owner;
  RefPtr<TransferState> whole;
  int ends = 0;
};

TEST_F(SplitTest, GivesEveryGroupItsShare) {
  split();
  std::vector<Slice> pieces;
  for (std::size_t group = 0; group < group_count; ++group) {
    const auto parts = drain(submissions[group]->take());
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0]->bytes(), 100u);
    EXPECT_EQ(parts[0]->deadline(), whole->deadline());
    EXPECT_EQ(parts[0]->peer_slot, peer->slot);
    EXPECT_EQ(peer->backlog[group], 100u);
    for (const Slice& slice : parts[0]->slices()) pieces.push_back(slice);
  }
  EXPECT_EQ(pieces, (std::vector<Slice>{{0, 4096, 100}, {100, 4196, 100}, {500, 9000, 100}}));
  EXPECT_FALSE(whole->done());
}

TEST_F(SplitTest, UsesOnlyGroupsWithRails) {
  down(1, rail(1));
  split();
  EXPECT_EQ(drain(submissions[0]->take()).size(), 1u);
  EXPECT_EQ(drain(submissions[1]->take()).size(), 0u);
  EXPECT_EQ(drain(submissions[2]->take()).size(), 1u);
}

TEST_F(SplitTest, WithoutARouteGroupZeroDecides) {
  peer->set_route(nullptr);
  split();
  const auto parts = drain(submissions[0]->take());
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0]->bytes(), 300u);
}

TEST_F(SplitTest, EndsOnceWithItsLastPart) {
  split();
  const auto parts = taken();
  ASSERT_EQ(parts.size(), 3u);
  for (const auto& part : parts) {
    EXPECT_FALSE(whole->done());
    part->complete({});
  }
  EXPECT_TRUE(whole->done());
  EXPECT_TRUE(whole->status().is_ok());
  EXPECT_EQ(ends, 1);
}

TEST_F(SplitTest, TheFirstErrorCancelsTheRest) {
  split();
  const auto parts = taken();
  parts.at(1)->complete({Errc::peer_lost, "the rail of group 1"});
  EXPECT_FALSE(whole->done());
  for (const std::size_t other : {0u, 2u}) {
    EXPECT_TRUE(parts[other]->cancel_requested());
    parts[other]->complete({Errc::cancelled, "by the split"});
  }
  ASSERT_TRUE(whole->done());
  EXPECT_EQ(whole->status().text(), "the rail of group 1");
  EXPECT_EQ(ends, 1);
}

TEST_F(SplitTest, ACancelReachesPartsWhicheverGroupHasThem) {
  split();
  const auto parts = taken();
  stage.send(scheduler, Orphan{0, parts.at(0), {Errc::channel_error, "its rail broke"}});
  whole->cancel();
  for (const auto& group : submissions)
    EXPECT_EQ(group->take_cancelled(), parts) << "every group is told; the one that has the part acts";
  for (const auto& part : parts) part->complete({Errc::cancelled, "by its caller"});
  EXPECT_TRUE(whole->status() == Errc::cancelled);
}

TEST_F(SplitTest, ACancelBeforeTheSplitIsNotForgotten) {
  whole->cancel();
  split();
  const auto parts = taken();
  ASSERT_EQ(parts.size(), 3u);
  for (const auto& part : parts) {
    EXPECT_TRUE(part->cancel_requested()) << "its poller looks at this when it takes it";
    part->complete({Errc::cancelled, "by its caller"});
  }
  EXPECT_TRUE(whole->done());
  for (const auto& group : submissions) group->take_cancelled();
}

TEST_F(SplitTest, EndsWhenThePollersHaveStopped) {
  for (const auto& group : submissions) EXPECT_EQ(group->close(), nullptr);
  split();
  ASSERT_TRUE(whole->done());
  EXPECT_TRUE(whole->status() == Errc::shutting_down);
  EXPECT_EQ(ends, 1);
}

TEST_F(SplitTest, StoppingDealsWithWhatCameBefore) {
  const auto orphan = transfer({{0, 0, 100}});
  for (const auto& group : submissions) EXPECT_EQ(group->close(), nullptr);
  caf::anon_send(scheduler, SplitTransfer{whole, peer});
  caf::anon_send(scheduler, Orphan{0, orphan, {Errc::channel_error, "its rail broke"}});
  caf::anon_send(scheduler, StopScheduler{});
  stage.run();
  EXPECT_TRUE(whole->done());
  EXPECT_TRUE(orphan->done());
}

}  // namespace
}  // namespace kvferry
