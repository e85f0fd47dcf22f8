#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/peer_table.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t own_life = 77;
const TimePoint start{1h};

RemoteRegion region(std::string name, RegionKey key, std::uint64_t size = 4096) {
  RemoteRegion made;
  made.key = key;
  made.name = std::move(name);
  made.size = size;
  return made;
}

// ---------------------------------------------------------------- records

TEST(PeerTable, KeepsOneRecordPerLife) {
  PeerTable table(own_life);
  const auto first = table.find_or_add("decode-0", 1);
  EXPECT_EQ(table.find_or_add("decode-0", 1), first);
  const auto next_life = table.find_or_add("decode-0", 2);
  EXPECT_NE(next_life, first);
  EXPECT_NE(next_life->slot, first->slot);
  EXPECT_EQ(first->name, "decode-0");
  EXPECT_EQ(first->incarnation, 1u);
  EXPECT_EQ(first->owner_incarnation, own_life);
  EXPECT_EQ(first->state.load(), PeerState::inbound);
  EXPECT_EQ(table.find_life(2), next_life);
  EXPECT_EQ(table.find_life(3), nullptr);
  EXPECT_EQ(table.find_slot(first->slot), first);
  EXPECT_EQ(table.find_slot(first->slot + 100), nullptr);
  EXPECT_EQ(table.all().size(), 2u);
}

TEST(PeerTable, ARemovedRecordLeavesItsNumberUnused) {
  PeerTable table(own_life);
  const auto first = table.find_or_add("a", 1);
  table.remove(first->slot);
  EXPECT_EQ(table.find_life(1), nullptr);
  EXPECT_EQ(table.find_slot(first->slot), nullptr);
  EXPECT_EQ(first->name, "a") << "handles of users stay valid";
  table.remove(first->slot);
  const auto again = table.find_or_add("a", 1);
  EXPECT_NE(again, first);
  EXPECT_NE(again->slot, first->slot);
}

TEST(PeerTable, ASessionKeepsItsRecord) {
  PeerTable table(own_life);
  const auto peer = table.find_or_add("a", 1);
  table.open_session(peer, start);
  table.remove(peer->slot);
  EXPECT_EQ(table.find_life(1), peer);
  EXPECT_TRUE(table.close_session(1));
  table.remove(peer->slot);
  EXPECT_EQ(table.find_life(1), nullptr);
}

// The peer drops numbers up to the last one it saw, so a new record of the same life goes on counting.
TEST(PeerTable, ANewRecordNumbersItsMessagesBeyondTheFormer) {
  PeerTable table(own_life);
  const auto former = table.find_or_add("a", 1);
  EXPECT_EQ(former->next_message.fetch_add(10), 1u);
  table.remove(former->slot);
  EXPECT_EQ(table.find_or_add("a", 1)->next_message.load(), 11u);
}

// ---------------------------------------------------------------- sessions

TEST(PeerTableSessions, RenewingKeepsTheToken) {
  PeerTable table(own_life);
  const auto peer = table.find_or_add("a", 1);
  const Token token = table.open_session(peer, start);
  EXPECT_EQ(table.open_session(peer, start + 1s), token);
  EXPECT_TRUE(table.silent_sessions(start + 500ms).empty()) << "renewing is a sign of life";
  EXPECT_EQ(table.authorize(token), SessionId{peer->slot});
}

TEST(PeerTableSessions, EverySessionHasItsOwnToken) {
  PeerTable table(own_life);
  std::set<Token> tokens;
  for (std::uint64_t life = 1; life <= 100; ++life)
    tokens.insert(table.open_session(table.find_or_add("a", life), start));
  EXPECT_EQ(tokens.size(), 100u);
}

TEST(PeerTableSessions, OnlyATokenThatWasGivenOpensAnything) {
  PeerTable table(own_life);
  EXPECT_EQ(table.authorize(Token{}), std::nullopt);
  const auto peer = table.find_or_add("a", 1);
  Token token = table.open_session(peer, start);
  EXPECT_TRUE(table.authorize(token));
  for (std::size_t byte = 0; byte < token.size(); ++byte) {
    Token wrong = token;
    wrong[byte] ^= std::byte{1};
    EXPECT_EQ(table.authorize(wrong), std::nullopt) << byte;
  }
  EXPECT_TRUE(table.close_session(1));
  EXPECT_EQ(table.authorize(token), std::nullopt);
  EXPECT_FALSE(table.close_session(1)) << "a session ends once";
  EXPECT_NE(table.open_session(peer, start), token) << "a new session has a new token";
}

TEST(PeerTableSessions, SilenceIsMeasuredFromTheLastSign) {
  PeerTable table(own_life);
  const auto quiet = table.find_or_add("quiet", 1);
  const auto lively = table.find_or_add("lively", 2);
  table.open_session(quiet, start);
  table.open_session(lively, start);
  EXPECT_TRUE(table.touch_session(2, start + 5s));
  EXPECT_FALSE(table.touch_session(3, start + 5s));
  EXPECT_TRUE(table.silent_sessions(start).empty());
  EXPECT_EQ(table.silent_sessions(start + 1s), std::vector{quiet});
  EXPECT_EQ(table.silent_sessions(start + 6s).size(), 2u);
  EXPECT_TRUE(table.close_session(1));
  EXPECT_EQ(table.silent_sessions(start + 6s), std::vector{lively});
  EXPECT_FALSE(table.touch_session(1, start)) << "a sign of life does not bring a session back";
}

TEST(PeerTableSessions, WaitFindsTheNewestOfThatName) {
  PeerTable table(own_life);
  EXPECT_EQ(table.wait_for_session("a", 0s), nullptr);
  const auto former = table.find_or_add("a", 1);
  const auto newest = table.find_or_add("a", 2);
  EXPECT_EQ(table.wait_for_session("a", 0s), nullptr) << "a record alone is no connection to us";
  table.open_session(former, start);
  EXPECT_EQ(table.wait_for_session("a", 0s), former);
  table.open_session(newest, start);
  table.open_session(table.find_or_add("b", 3), start);
  EXPECT_EQ(table.wait_for_session("a", 0s), newest);
  table.open_session(former, start + 1s);
  EXPECT_EQ(table.wait_for_session("a", 0s), newest) << "renewing does not make it newer";
}

TEST(PeerTableSessions, WaitIsWokenByASessionAndByClose) {
  PeerTable table(own_life);
  std::thread opener([&] { table.open_session(table.find_or_add("a", 1), start); });
  const auto found = table.wait_for_session("a", Duration::max());
  opener.join();
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->incarnation, 1u);
  std::thread closer([&] { table.close(); });
  EXPECT_EQ(table.wait_for_session("nobody", 30s), nullptr);
  closer.join();
  EXPECT_EQ(table.wait_for_session("nobody", 30s), nullptr);
}

// ---------------------------------------------------------------- one record

TEST(PeerRecord, ForgetsARegionOnlyInItsRegistration) {
  PeerRecord peer(1, own_life, "a", 5);
  EXPECT_EQ(peer.find_region("kv"), nullptr);
  peer.set_region(region("kv", {1, 1}));
  const auto first = peer.find_region("kv");
  ASSERT_NE(first, nullptr);
  peer.set_region(region("kv", {1, 2}, 8192));
  peer.forget_region("kv", {1, 1});
  ASSERT_NE(peer.find_region("kv"), nullptr) << "the newer registration stays";
  EXPECT_EQ(peer.find_region("kv")->size, 8192u);
  EXPECT_EQ(first->size, 4096u) << "who holds the former still sees it whole";
  peer.forget_region("kv", {1, 2});
  EXPECT_EQ(peer.find_region("kv"), nullptr);
  peer.forget_region("kv", {1, 2});
}

TEST(PeerRecord, AcceptsEachNotificationOncePerGroup) {
  PeerRecord peer(1, own_life, "prefill-0", 5);
  NotificationQueue queue;
  const std::uint64_t group_1 = std::uint64_t{1} << 56;
  EXPECT_TRUE(peer.accept_notification(1, queue, 10));
  EXPECT_TRUE(peer.accept_notification(1, queue, 10)) << "the repeat is acknowledged, not queued";
  EXPECT_TRUE(peer.accept_notification(group_1 | 1, queue, 20)) << "each group counts for itself";
  EXPECT_TRUE(peer.accept_notification(3, queue, 30));
  EXPECT_TRUE(peer.accept_notification(2, queue, 40));
  EXPECT_TRUE(peer.accept_notification(2, queue, 40));
  std::vector<std::uint32_t> got;
  while (auto notification = queue.pop(0s)) {
    EXPECT_EQ(notification->peer, "prefill-0");
    EXPECT_EQ(notification->incarnation, 5u);
    got.push_back(notification->immediate);
  }
  EXPECT_EQ(got, (std::vector<std::uint32_t>{10, 20, 30, 40}));
}

TEST(PeerRecord, ANotificationWithoutRoomIsOfferedAgain) {
  PeerRecord peer(1, own_life, "a", 5);
  NotificationQueue queue;
  for (std::size_t i = 0; i < NotificationQueue::capacity; ++i) ASSERT_TRUE(queue.push({"other", 1, 0}));
  EXPECT_FALSE(peer.accept_notification(1, queue, 10));
  ASSERT_TRUE(queue.pop(0s));
  EXPECT_TRUE(peer.accept_notification(1, queue, 10)) << "it was not marked as seen";
  std::size_t ours = 0;
  while (auto notification = queue.pop(0s)) ours += notification->peer == "a";
  EXPECT_EQ(ours, 1u);
}

TEST(PeerRecord, SaysWhyItRefusesInEveryState) {
  PeerRecord peer(1, own_life, "decode-3", 5);
  EXPECT_TRUE(peer.refusal() == Errc::no_path);
  EXPECT_NE(peer.refusal().text().find("call connect()"), std::string_view::npos) << peer.refusal().text();
  peer.set_state(PeerState::connecting);
  EXPECT_TRUE(peer.refusal() == Errc::no_path);
  EXPECT_NE(peer.refusal().text().find("decode-3"), std::string_view::npos);
  const struct {
    PeerState state;
    Errc code;
    const char* text;
    const char* prefix;
  } cases[] = {{PeerState::suspect, Errc::peer_lost, "the socket broke", "no rail is up: "},
               {PeerState::lost, Errc::peer_lost, "it does not answer", "lost: "},
               {PeerState::stale, Errc::stale_peer, "it restarted", "stale: "},
               {PeerState::closed, Errc::cancelled, "it was disconnected", "closed: "}};
  for (const auto& c : cases) {
    peer.set_state(c.state, {c.code, c.text});
    EXPECT_TRUE(peer.refusal() == c.code) << peer.refusal().to_string();
    EXPECT_EQ(peer.refusal().text(), c.text);
    EXPECT_EQ(peer.describe(), std::string(c.prefix) + c.text);
  }
  peer.set_state(PeerState::up);
  EXPECT_TRUE(peer.refusal() == Errc::no_path) << "the reason of a former state is gone";
}

TEST(PeerRecord, DescribesItselfForPeople) {
  PeerRecord peer(1, own_life, "a", 5);
  EXPECT_EQ(peer.describe(), "connected to us, no rails of ours");
  peer.set_state(PeerState::connecting);
  EXPECT_EQ(peer.describe(), "connecting");
  peer.set_state(PeerState::up);
  peer.set_route(std::make_shared<Route>(Route{{0}, "shm, tcp"}));
  EXPECT_EQ(peer.describe(), "up over shm, tcp");
  peer.set_route(nullptr);
  EXPECT_EQ(peer.describe(), "up over nothing");
}

TEST(PeerRecord, IsReadWhileItIsWritten) {
  PeerRecord peer(1, own_life, "a", 5);
  std::thread writer([&] {
    for (std::uint32_t i = 0; i < 2000; ++i) {
      peer.set_state(i % 2 ? PeerState::up : PeerState::lost, i % 2 ? Status() : Status(Errc::peer_lost, "gone"));
      peer.set_region(region("kv", {1, i}));
      peer.set_route(std::make_shared<Route>(Route{{i % 4}, "tcp"}));
      peer.set_address("tcp://127.0.0.1:" + std::to_string(i));
    }
  });
  for (int i = 0; i < 2000; ++i) {
    const auto route = peer.route();
    EXPECT_TRUE(!route || route->groups.size() == 1);
    const auto found = peer.find_region("kv");
    EXPECT_TRUE(!found || found->name == "kv");
    EXPECT_FALSE(peer.describe().empty());
    EXPECT_FALSE(peer.refusal().is_ok());
  }
  writer.join();
}

TEST(Random, NeverGivesZeroAndHardlyEverTheSame) {
  std::set<std::uint64_t> numbers;
  std::set<Token> tokens;
  for (int i = 0; i < 1000; ++i) {
    numbers.insert(random_u64());
    tokens.insert(random_token());
  }
  EXPECT_EQ(numbers.size(), 1000u);
  EXPECT_FALSE(numbers.contains(0));
  EXPECT_EQ(tokens.size(), 1000u);
}

}  // namespace
}  // namespace kvferry
