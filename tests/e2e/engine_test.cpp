// What a program may expect of two connected engines, over each transport.
#include <array>
#include <atomic>
#include <coroutine>
#include <cstring>
#include <thread>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

class EngineTest : public ::testing::TestWithParam<const char*> {
 protected:
  Pair pair_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(, EngineTest, each_transport(), transport_name);

TEST_P(EngineTest, ReadsWhatThePeerHolds) {
  const Region theirs = pair_.target.allocate("kv", 8 * mib).value();
  const Region ours = pair_.initiator.allocate("local", 8 * mib).value();
  fill(theirs.bytes(), 1);
  const Slice all{0, 0, 8 * mib};
  const Transfer transfer = pair_.initiator.read(pair_.peer, ours, "kv", {&all, 1});
  EXPECT_TRUE(transfer.wait()) << transfer.status().to_string();
  EXPECT_EQ(transfer.bytes(), 8 * mib);
  EXPECT_EQ(wrong_bytes(ours.bytes(), 1), 0u);
}

TEST_P(EngineTest, WritesScatteredSlicesWhereTheyBelong) {
  constexpr std::size_t count = 2048;
  const Region theirs = pair_.target.allocate("kv", count * 4 * kib).value();
  const Region ours = pair_.initiator.allocate("local", count * 4 * kib).value();
  fill(ours.bytes(), 2);
  const auto slices = shuffled_slices(count, 4 * kib, 7);
  const Transfer transfer = pair_.initiator.write(pair_.peer, ours, "kv", slices);
  ASSERT_TRUE(transfer.wait()) << transfer.status().to_string();
  for (const Slice& slice : slices)
    ASSERT_EQ(std::memcmp(ours.data() + slice.local_offset, theirs.data() + slice.remote_offset, slice.length), 0);
}

TEST_P(EngineTest, MovesEverySizeToTheByte) {
  const Region theirs = pair_.target.allocate("kv", 4 * mib).value();
  const Region ours = pair_.initiator.allocate("local", 4 * mib).value();
  fill(ours.bytes(), 3);
  for (const std::uint64_t size : {1ul, 3ul, 63ul, 4095ul, 4097ul, 65537ul, 262145ul, 2 * mib + 5}) {
    std::memset(theirs.data(), 0, theirs.size());
    const Slice slice{8, 16, size};
    const Transfer transfer = pair_.initiator.write(pair_.peer, ours, "kv", {&slice, 1});
    ASSERT_TRUE(transfer.wait()) << transfer.status().to_string();
    EXPECT_EQ(wrong_bytes(theirs.bytes().subspan(16, size), 3, 8), 0u) << size;
    EXPECT_EQ(nonzero_bytes(theirs.bytes().first(16)), 0u) << size;
    EXPECT_EQ(nonzero_bytes(theirs.bytes().subspan(16 + size)), 0u) << size;
  }
}

TEST_P(EngineTest, StartsThousandsOfTransfersToARegionThatItDoesNotKnowYet) {
  constexpr std::uint64_t count = 5000;
  const Region theirs = pair_.target.allocate("late", count * 64).value();
  const Region ours = pair_.initiator.allocate("local", count * 64).value();
  fill(theirs.bytes(), 5);
  std::vector<Transfer> transfers;
  for (std::uint64_t i = 0; i < count; ++i) {
    const Slice slice{i * 64, i * 64, 64};
    transfers.push_back(pair_.initiator.read(pair_.peer, ours, "late", {&slice, 1}, {.deadline = slow(10s)}));
  }
  for (const Transfer& transfer : transfers) ASSERT_TRUE(transfer.wait()) << transfer.status().to_string();
  EXPECT_EQ(wrong_bytes(ours.bytes(), 5), 0u);
}

TEST_P(EngineTest, MovesMemoryThatTheProgramOwns) {
  std::vector<std::byte> mine(3 * mib);
  std::vector<std::byte> remote(3 * mib);
  const Region theirs = pair_.target.register_memory("kv", remote.data(), remote.size()).value();
  const Region ours = pair_.initiator.register_memory("local", mine.data(), mine.size()).value();
  fill(mine, 4);
  const Slice all{0, 0, mine.size()};
  Status status = pair_.initiator.write(pair_.peer, ours, "kv", {&all, 1}).wait();
  ASSERT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(remote, 4), 0u);
  fill(remote, 5);
  status = pair_.initiator.read(pair_.peer, ours, "kv", {&all, 1}).wait();
  ASSERT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(mine, 5), 0u);
}

TEST_P(EngineTest, FindsRegionsThatCameAfterTheConnection) {
  const Region ours = pair_.initiator.allocate("local", 4 * kib).value();
  const Slice slice{0, 0, 4 * kib};
  EXPECT_EQ(pair_.initiator.find_region(pair_.peer, "late").status().code(), Errc::unknown_region);
  EXPECT_EQ(pair_.initiator.read(pair_.peer, ours, "late", {&slice, 1}).wait().code(), Errc::unknown_region);
  const Region late = pair_.target.allocate("late", 4 * kib).value();
  fill(late.bytes(), 6);
  const RemoteHandle handle = pair_.initiator.find_region(pair_.peer, "late").value();
  EXPECT_EQ(handle.name(), "late");
  EXPECT_EQ(handle.size(), 4 * kib);
  const Status status = pair_.initiator.read(pair_.peer, ours, handle, {&slice, 1}).wait();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(ours.bytes(), 6), 0u);
}

TEST_P(EngineTest, LetsPeersDoOnlyWhatARegionAllows) {
  const Region read_only = pair_.target.allocate("read_only", 4 * kib, {Access::read}).value();
  const Region write_only = pair_.target.allocate("write_only", 4 * kib, {Access::write}).value();
  const Region ours = pair_.initiator.allocate("local", 4 * kib).value();
  fill(ours.bytes(), 7);
  const Slice slice{0, 0, 4 * kib};
  const Status written = pair_.initiator.write(pair_.peer, ours, "read_only", {&slice, 1}).wait();
  EXPECT_EQ(written.code(), Errc::access_denied);
  EXPECT_NE(written.text().find("read_only"), std::string_view::npos) << written.text();
  EXPECT_EQ(nonzero_bytes(read_only.bytes()), 0u);
  EXPECT_EQ(pair_.initiator.read(pair_.peer, ours, "write_only", {&slice, 1}).wait().code(), Errc::access_denied);
  EXPECT_TRUE(pair_.initiator.read(pair_.peer, ours, "read_only", {&slice, 1}).wait());
  EXPECT_TRUE(pair_.initiator.write(pair_.peer, ours, "write_only", {&slice, 1}).wait());
}

TEST_P(EngineTest, TellsTheTargetOnceAllDataIsThere) {
  constexpr std::size_t count = 64;
  const Region theirs = pair_.target.allocate("kv", count * 64 * kib).value();
  const Region ours = pair_.initiator.allocate("local", count * 64 * kib).value();
  fill(ours.bytes(), 8);
  for (std::uint32_t round = 0; round < 8; ++round) {
    std::memset(theirs.data(), 0, theirs.size());
    const auto slices = shuffled_slices(count, 64 * kib, round);
    const Transfer transfer = pair_.initiator.write_imm(pair_.peer, ours, "kv", slices, 100 + round);
    const Notification notification = pair_.target.next_notification(slow(5s)).value();
    std::size_t wrong = 0;
    for (const Slice& slice : slices)
      wrong += std::memcmp(ours.data() + slice.local_offset, theirs.data() + slice.remote_offset, slice.length) != 0;
    EXPECT_EQ(wrong, 0u) << "slices that were not there when the notification came";
    EXPECT_EQ(notification.immediate, 100 + round);
    EXPECT_EQ(notification.peer, "initiator");
    EXPECT_EQ(notification.incarnation, pair_.initiator.incarnation());
    EXPECT_TRUE(transfer.wait()) << transfer.status().to_string();
  }
}

TEST_P(EngineTest, CompletesForEveryKindOfWaiter) {
  const Region theirs = pair_.target.allocate("kv", 64 * kib).value();
  const Region ours = pair_.initiator.allocate("local", 64 * kib).value();
  const Slice slice{0, 0, 64 * kib};
  const Transfer transfer = pair_.initiator.read(pair_.peer, ours, "kv", {&slice, 1});
  std::atomic<int> offloaded{0};
  std::atomic<int> in_place{0};
  transfer.on_complete([&](const Status& status) { offloaded += status.is_ok() ? 1 : 100; });
  transfer.on_complete([&](const Status& status) { in_place += status.is_ok() ? 1 : 100; }, Dispatch::in_place);
  ASSERT_TRUE(transfer.wait_for(slow(5s)));
  EXPECT_TRUE(transfer.done());
  EXPECT_TRUE(transfer.status().is_ok());
  EXPECT_TRUE(eventually(slow(5s), [&] { return offloaded == 1 && in_place == 1; }));
  transfer.on_complete([&](const Status&) { ++offloaded; });
  EXPECT_EQ(offloaded, 2) << "a callback added after the end runs at once";
}

struct Detached {
  struct promise_type {
    Detached get_return_object() { return {}; }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };
};

Detached read_in_turn(Engine& engine, Peer peer, Region local, int times, std::atomic<int>& done, Status& outcome) {
  const Slice slice{0, 0, 64 * kib};
  for (int i = 0; i < times; ++i) {
    outcome = co_await engine.read(peer, local, "kv", {&slice, 1});
    if (!outcome.is_ok()) break;
    ++done;
  }
  done += 1000;
}

TEST_P(EngineTest, ResumesCoroutines) {
  const Region theirs = pair_.target.allocate("kv", 64 * kib).value();
  const Region ours = pair_.initiator.allocate("local", 64 * kib).value();
  std::atomic<int> done{0};
  Status outcome;
  read_in_turn(pair_.initiator, pair_.peer, ours, 50, done, outcome);
  EXPECT_TRUE(eventually(slow(5s), [&] { return done >= 1000; }));
  EXPECT_EQ(done, 1050) << outcome.to_string();
}

TEST_P(EngineTest, ServesManyThreadsAtOnce) {
  constexpr std::uint64_t share = 256 * kib;
  constexpr int threads = 8;
  const Region theirs = pair_.target.allocate("kv", threads * share).value();
  const Region ours = pair_.initiator.allocate("local", threads * share).value();
  const Region back = pair_.initiator.allocate("back", threads * share).value();
  fill(ours.bytes(), 9);
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < threads; ++t)
    callers.emplace_back([&, t] {
      const auto priority = static_cast<Priority>(t % 3);
      const Slice slice{t * share, t * share, share};
      for (int i = 0; i < 20; ++i) {
        const bool written =
            pair_.initiator.write(pair_.peer, ours, "kv", {&slice, 1}, {.priority = priority}).wait().is_ok();
        const bool read =
            pair_.initiator.read(pair_.peer, back, "kv", {&slice, 1}, {.priority = priority}).wait().is_ok();
        failures += !written + !read;
      }
    });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(wrong_bytes(theirs.bytes(), 9), 0u);
  EXPECT_EQ(wrong_bytes(back.bytes(), 9), 0u);
  EXPECT_EQ(counter(pair_.initiator, "transfers_ok"), 2u * 20 * threads);
  EXPECT_EQ(counter(pair_.initiator, "transfers_failed"), 0u);
}

TEST_P(EngineTest, RunsInBothDirectionsAtOnce) {
  const Peer back = pair_.target.connect(pair_.initiator.address()).value();
  const Region theirs = pair_.target.allocate("kv", 4 * mib).value();
  const Region ours = pair_.initiator.allocate("kv", 4 * mib).value();
  fill(theirs.bytes().first(2 * mib), 10);
  fill(ours.bytes().first(2 * mib), 11);
  const Slice slice{0, 2 * mib, 2 * mib};
  const Transfer there = pair_.initiator.write(pair_.peer, ours, "kv", {&slice, 1});
  const Transfer here = pair_.target.write(back, theirs, "kv", {&slice, 1});
  EXPECT_TRUE(there.wait()) << there.status().to_string();
  EXPECT_TRUE(here.wait()) << here.status().to_string();
  EXPECT_EQ(wrong_bytes(theirs.bytes().subspan(2 * mib), 11), 0u);
  EXPECT_EQ(wrong_bytes(ours.bytes().subspan(2 * mib), 10), 0u);
}

TEST_P(EngineTest, ServesSeveralInitiators) {
  const Region theirs = pair_.target.allocate("kv", 4 * mib).value();
  std::vector<Engine> engines;
  std::vector<Region> regions;
  std::vector<Transfer> transfers;
  for (std::uint64_t i = 0; i < 4; ++i) {
    engines.push_back(start(config_of("initiator-" + std::to_string(i), GetParam())));
    regions.push_back(engines.back().allocate("local", mib).value());
    fill(regions.back().bytes(), 20 + i);
    const Peer peer = engines.back().connect(pair_.target.address()).value();
    const Slice slice{0, i * mib, mib};
    transfers.push_back(engines.back().write(peer, regions.back(), "kv", {&slice, 1}));
  }
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(transfers[i].wait()) << transfers[i].status().to_string();
    EXPECT_EQ(wrong_bytes(theirs.bytes().subspan(i * mib, mib), 20 + i), 0u);
    EXPECT_EQ(pair_.target.accept("initiator-" + std::to_string(i), slow(1s)).value().incarnation(),
              engines[i].incarnation());
  }
}

TEST_P(EngineTest, ReachesItself) {
  const Region theirs = pair_.target.allocate("kv", mib).value();
  const Region ours = pair_.target.allocate("local", mib).value();
  fill(theirs.bytes(), 12);
  const Peer self = pair_.target.connect(pair_.target.address()).value();
  const Slice slice{0, 0, mib};
  const Status status = pair_.target.read(self, ours, "kv", {&slice, 1}).wait();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(ours.bytes(), 12), 0u);
}

TEST_P(EngineTest, SplitsLargeTransfersOverItsPollers) {
  EngineConfig target_config = config_of("target", GetParam());
  EngineConfig config = config_of("initiator", GetParam());
  target_config.pollers = config.pollers = 3;
  config.rails = 3;
  config.split_bytes = mib;
  Pair pair(target_config, config);
  const Region theirs = pair.target.allocate("kv", 24 * mib).value();
  const Region ours = pair.initiator.allocate("local", 24 * mib).value();
  fill(ours.bytes(), 13);
  const auto slices = shuffled_slices(24 * 16, 64 * kib, 3);
  const Transfer transfer = pair.initiator.write(pair.peer, ours, "kv", slices);
  ASSERT_TRUE(transfer.wait()) << transfer.status().to_string();
  for (const Slice& slice : slices)
    ASSERT_EQ(std::memcmp(ours.data() + slice.local_offset, theirs.data() + slice.remote_offset, slice.length), 0);
  EXPECT_EQ(counter(pair.initiator, "transfers_failed"), 0u);
}

TEST_P(EngineTest, ConnectsAgainAfterADisconnect) {
  const Region theirs = pair_.target.allocate("kv", 4 * kib).value();
  const Region ours = pair_.initiator.allocate("local", 4 * kib).value();
  fill(theirs.bytes(), 14);
  const Slice slice{0, 0, 4 * kib};
  EXPECT_TRUE(pair_.initiator.read(pair_.peer, ours, "kv", {&slice, 1}).wait());
  pair_.initiator.disconnect(pair_.peer);
  EXPECT_TRUE(eventually(slow(5s), [&] {
    return pair_.initiator.read(pair_.peer, ours, "kv", {&slice, 1}).wait().code() == Errc::cancelled;
  }));
  EXPECT_TRUE(pair_.peer.describe().starts_with("closed")) << pair_.peer.describe();
  const Peer again = pair_.initiator.connect(pair_.target.address()).value();
  const Status status = pair_.initiator.read(again, ours, "kv", {&slice, 1}).wait();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(ours.bytes(), 14), 0u);
}

TEST_P(EngineTest, SaysHowItIsConnected) {
  EXPECT_EQ(pair_.peer.name(), "target");
  EXPECT_EQ(pair_.peer.incarnation(), pair_.target.incarnation());
  EXPECT_EQ(pair_.peer.describe(), std::string("up over ") + GetParam());
  EXPECT_EQ(pair_.initiator.peers().size(), 1u);
  const Peer inbound = pair_.target.accept("initiator", slow(1s)).value();
  EXPECT_EQ(inbound.incarnation(), pair_.initiator.incarnation());
}

TEST(EngineChoice, PrefersSharedMemoryOnOneHost) {
  Pair pair(config_of("target"), config_of("initiator"));
  EXPECT_TRUE(eventually(slow(5s), [&] { return pair.peer.describe() == "up over shm, tcp"; })) << pair.peer.describe();
}

}  // namespace
}  // namespace kvferry::test
