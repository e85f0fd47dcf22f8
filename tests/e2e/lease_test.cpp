// Leases between whole engines: who may write, where, and until when.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

constexpr std::uint64_t region_bytes = 8 * mib;

class LeaseTest : public testing::TestWithParam<const char*> {
 protected:
  Lease lease(std::vector<ByteRange> ranges, Duration time = 1h, Access access = Access::write) {
    return pair.target.lease(holder, kv, ranges, {.access = access, .time = time}).value();
  }
  Status write(const std::string& name, const Slice& slice) {
    return pair.initiator.write(pair.peer, local, name, {&slice, 1}).wait();
  }

  Pair pair{GetParam()};
  Region kv =
      pair.target.allocate("kv", region_bytes, {.access = Access::none, .leasable = Access::read_write}).value();
  Region local = pair.initiator.allocate("local", region_bytes).value();
  Peer holder = pair.target.accept("initiator", 5s).value();
};

TEST_P(LeaseTest, OpensARegionThatIsOtherwiseClosed) {
  fill(local.bytes(), 1);
  const Lease given = lease({{64 * kib, 64 * kib}});
  EXPECT_EQ(write("kv", {0, 64 * kib, 8}).code(), Errc::access_denied) << "without the lease";
  EXPECT_TRUE(write(given.name(), {64 * kib, 64 * kib, 64 * kib}));
  EXPECT_EQ(wrong_bytes(kv.bytes().subspan(64 * kib, 64 * kib), 1, 64 * kib), 0u);
  EXPECT_EQ(nonzero_bytes(kv.bytes()), nonzero_bytes(kv.bytes().subspan(64 * kib, 64 * kib)));
}

TEST_P(LeaseTest, NamesTheSliceThatLeavesIt) {
  const Lease given = lease({{0, 4096}, {8192, 4096}, {4096, 1024}});
  fill(local.bytes(), 1);
  const std::vector<Slice> slices{{0, 0, 5120}, {8192, 8192, 4096}, {5120, 5120, 8}};
  const Status status = pair.initiator.write(pair.peer, local, given.name(), slices).wait();
  EXPECT_EQ(status.code(), Errc::access_denied);
  EXPECT_NE(status.text().find("slice 2"), std::string_view::npos) << status.text();
  EXPECT_EQ(nonzero_bytes(kv.bytes()), 0u);
  EXPECT_TRUE(pair.initiator.write(pair.peer, local, given.name(), std::span(slices).first(2)).wait());
}

TEST_P(LeaseTest, AllowsWhatItsAccessSays) {
  fill(kv.bytes(), 2);
  const Lease read_only = lease({{0, 4096}}, 1h, Access::read);
  EXPECT_EQ(write(read_only.name(), {0, 0, 8}).code(), Errc::access_denied);
  const Slice slice{0, 0, 4096};
  EXPECT_TRUE(pair.initiator.read(pair.peer, local, read_only.name(), {&slice, 1}).wait());
  EXPECT_EQ(wrong_bytes(local.bytes().first(4096), 2), 0u);
}

TEST_P(LeaseTest, IsNotForOtherPeers) {
  const Lease given = lease({{0, 4096}});
  Engine stranger = start(config_of("stranger", GetParam()));
  const Peer target = stranger.connect(pair.target.address()).value();
  Region theirs = stranger.allocate("theirs", 4096).value();
  fill(theirs.bytes(), 3);
  const Slice slice{0, 0, 4096};
  EXPECT_EQ(stranger.write(target, theirs, given.name(), {&slice, 1}).wait().code(), Errc::access_denied);
  EXPECT_EQ(stranger.find_region(target, given.name()).status().code(), Errc::access_denied);
  EXPECT_EQ(nonzero_bytes(kv.bytes()), 0u);
}

TEST_P(LeaseTest, EndsByItself) {
  const Lease given = lease({{0, 4096}}, 100ms);
  const RemoteHandle known = pair.initiator.find_region(pair.peer, given.name()).value();
  const Slice slice{0, 0, 4096};
  ASSERT_TRUE(pair.initiator.write(pair.peer, local, known, {&slice, 1}).wait());
  std::this_thread::sleep_until(given.end() + slow(50ms));
  EXPECT_EQ(pair.initiator.write(pair.peer, local, known, {&slice, 1}).wait().code(), Errc::access_denied);
  EXPECT_TRUE(pair.target.revoke(given));
  EXPECT_FALSE(pair.initiator.find_region(pair.peer, given.name()));
}

TEST_P(LeaseTest, RevokedTwiceIsRevoked) {
  const Lease given = lease({{0, 4096}});
  EXPECT_TRUE(pair.target.revoke(given));
  EXPECT_TRUE(pair.target.revoke(given));
  EXPECT_FALSE(write(given.name(), {0, 0, 8}));
}

// The writer never stops by itself; the moment of the revocation walks through its transfers.
TEST_P(LeaseTest, NothingLandsOnceItIsRevoked) {
  std::minstd_rand random(7);
  for (int round = 0; round < 40; ++round) {
    fill(local.bytes(), static_cast<std::uint64_t>(round) + 10);
    const Lease given = lease({{0, region_bytes}});
    const RemoteHandle known = pair.initiator.find_region(pair.peer, given.name()).value();
    std::atomic<int> written{0};
    Status last;
    std::thread writer([&] {
      const auto slices = shuffled_slices(region_bytes / (64 * kib), 64 * kib, static_cast<std::uint32_t>(round));
      while ((last = pair.initiator.write(pair.peer, local, known, slices).wait())) ++written;
    });
    EXPECT_TRUE(eventually(slow(5s), [&] { return written > 0; }));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    EXPECT_TRUE(pair.target.revoke(given));
    const Snapshot after(kv.bytes());
    std::memset(local.data(), round, local.size());  // what lands from here on would be seen
    std::this_thread::sleep_for(5ms);
    writer.join();
    EXPECT_EQ(last.code(), Errc::access_denied) << last.to_string();
    EXPECT_EQ(after.changed_bytes(), 0u) << "round " << round;
  }
}

TEST_P(LeaseTest, EndsWithItsRegion) {
  const Lease given = lease({{0, 4096}});
  const RemoteHandle known = pair.initiator.find_region(pair.peer, given.name()).value();
  ASSERT_TRUE(pair.target.unregister_region(kv));
  const Slice slice{0, 0, 8};
  EXPECT_EQ(pair.initiator.write(pair.peer, local, known, {&slice, 1}).wait().code(), Errc::access_denied);
  EXPECT_EQ(pair.target.lease(holder, kv, std::vector<ByteRange>{{0, 8}}, {.time = 1h}).status().code(),
            Errc::unknown_region);
  EXPECT_TRUE(pair.target.revoke(given));
}

TEST_P(LeaseTest, RefusesWhatMakesNoSense) {
  const auto asked = [&](std::vector<ByteRange> ranges, LeaseOptions options) {
    return pair.target.lease(holder, kv, ranges, options).status().code();
  };
  EXPECT_EQ(asked({}, {.time = 1h}), Errc::invalid_argument);
  EXPECT_EQ(asked({{8, 0}}, {.time = 1h}), Errc::invalid_argument);
  EXPECT_EQ(asked({{0, 8}}, {}), Errc::invalid_argument) << "a lease without an end";
  EXPECT_EQ(asked({{0, 8}}, {.access = Access::none, .time = 1h}), Errc::invalid_argument);
  EXPECT_EQ(asked({{0, region_bytes + 1}}, {.time = 1h}), Errc::out_of_bounds);
  EXPECT_EQ(asked({{UINT64_MAX, 2}}, {.time = 1h}), Errc::out_of_bounds);
  const Region closed = pair.target.allocate("closed", 4096, {.access = Access::read}).value();
  EXPECT_EQ(pair.target.lease(holder, closed, std::vector<ByteRange>{{0, 8}}, {.time = 1h}).status().code(),
            Errc::access_denied);
  EXPECT_EQ(pair.target.lease(Peer(), kv, {}, {.time = 1h}).status().code(), Errc::invalid_argument);
  EXPECT_EQ(pair.target.revoke(Lease()).code(), Errc::invalid_argument);
  std::vector<ByteRange> many;
  for (std::uint64_t i = 0; i <= max_lease_ranges; ++i) many.push_back({2 * i, 1});
  EXPECT_EQ(asked(many, {.time = 1h}), Errc::too_large);
}

TEST_P(LeaseTest, AsManyRangesAsAllowedReachTheHolder) {
  std::vector<ByteRange> many;
  for (std::uint64_t i = 0; i < max_lease_ranges; ++i) many.push_back({16 * i, 8});
  const Lease given = lease(many);
  const RemoteHandle known = pair.initiator.find_region(pair.peer, given.name()).value();
  const std::uint64_t last = 16 * (max_lease_ranges - 1);
  const Slice inside{0, last, 8};
  EXPECT_TRUE(pair.initiator.write(pair.peer, local, known, {&inside, 1}).wait());
  const Slice outside{0, last + 1, 8};
  EXPECT_EQ(pair.initiator.write(pair.peer, local, known, {&outside, 1}).wait().code(), Errc::access_denied);
}

TEST_P(LeaseTest, AnEngineEndsWithLeasesOpen) {
  for (int i = 0; i < 100; ++i) lease({{0, 4096}}, 1h);
  lease({{0, 4096}}, 1ms);
  const TimePoint begin = Clock::now();
  { const Engine gone = std::move(pair.target); }
  EXPECT_LT(Clock::now() - begin, slow(1s));
}

INSTANTIATE_TEST_SUITE_P(Transports, LeaseTest, each_transport(), transport_name);

}  // namespace
}  // namespace kvferry::test
