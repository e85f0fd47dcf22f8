// Many RDMA rails under a simulated clock: how much of them a steady load uses, and what a lost one costs.
#include <algorithm>
#include <chrono>
#include <cstdint>

#include <gtest/gtest.h>

#include "tests/support/rail_simulation.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kib = 1 << 10;

/// The share of the rails that comes through in 1 ms of simulated time, once the load is steady.
double share_of(std::uint32_t rails, std::uint64_t block_bytes, Op op = Op::read, std::size_t in_flight = 64) {
  RailLoad load;
  load.rails = rails;
  load.block_bytes = block_bytes;
  load.op = op;
  load.in_flight = in_flight;
  RailSimulation simulation(load);
  simulation.run_for(300us);
  const double share = simulation.measure_share(1ms, rails);
  EXPECT_TRUE(simulation.failures().empty());
  EXPECT_TRUE(simulation.broken_rules().empty());
  return share;
}

TEST(ManyRails, EightAreFilledByLargeBlocks) { EXPECT_GE(share_of(8, 1024 * kib), 0.98); }
TEST(ManyRails, EightAreFilledByBlocksOf64KiB) { EXPECT_GE(share_of(8, 64 * kib), 0.95); }
TEST(ManyRails, EightAreFilledByBlocksOf16KiB) { EXPECT_GE(share_of(8, 16 * kib), 0.90); }
TEST(ManyRails, SmallBlocksReachTheDevicesRateOfOperations) { EXPECT_GE(share_of(2, 4 * kib), 0.90); }
TEST(ManyRails, WritesFillThemToo) { EXPECT_GE(share_of(4, 64 * kib, Op::write), 0.95); }

TEST(ManyRails, OneTransferOfSmallBlocksCanNotFillThem) {
  EXPECT_LT(share_of(8, 4 * kib, Op::read, 1), 0.5) << "the simulation takes no time";
}

TEST(ManyRails, TheSameLoadGivesTheSameFigures) { EXPECT_EQ(share_of(3, 16 * kib), share_of(3, 16 * kib)); }

TEST(ManyRails, BytesArriveWhereTheyBelong) {
  for (const Op op : {Op::read, Op::write}) {
    RailLoad load;
    load.rails = 3;
    load.block_bytes = 20 * kib;
    load.blocks = 40;
    load.in_flight = 4;
    load.op = op;
    load.verify = true;
    RailSimulation simulation(load);
    simulation.run_for(200us);
    ASSERT_TRUE(simulation.finish(10ms));
    EXPECT_GT(simulation.transfers_ok(), 20u);
    EXPECT_EQ(simulation.wrong_blocks(), 0u);
  }
}

/// Two rails of which one is lost; the load is verified.
class LostRail : public testing::TestWithParam<Op> {
 protected:
  static RailLoad load() {
    RailLoad made;
    made.rails = 2;
    made.blocks = 40;
    made.in_flight = 12;
    made.op = GetParam();
    made.verify = true;
    return made;
  }
  static void expect_all_right(RailSimulation& simulation) {
    ASSERT_TRUE(simulation.finish(2s)) << "some transfers have not ended";
    EXPECT_GT(simulation.transfers_ok(), 12u);
    for (const Status& failure : simulation.failures()) ADD_FAILURE() << failure.to_string();
    EXPECT_EQ(simulation.wrong_blocks(), 0u);
    EXPECT_TRUE(simulation.broken_rules().empty());
  }
};

TEST_P(LostRail, WhoseDeviceSaysSoLeavesTheOtherFull) {
  RailSimulation simulation(load());
  simulation.run_for(500us);
  simulation.lose_port(1);
  simulation.run_for(1ms);
  EXPECT_EQ(simulation.rails_down().size(), 1u);
  EXPECT_GE(simulation.measure_share(2ms, 1), 0.95);
  expect_all_right(simulation);
}

TEST_P(LostRail, ThatIsSilentLeavesTheOtherFullAndLosesNothing) {
  RailLoad quick = load();
  // Half a second takes the test too long, a few milliseconds show the same.
  quick.speed.retry_ns = 500'000;
  RailSimulation simulation(quick);
  simulation.run_for(500us);
  simulation.lose_peer(1);
  simulation.run_for(1ms);
  EXPECT_EQ(simulation.rails_down().size(), 0u) << "nobody knows yet";
  simulation.run_for(4ms);
  EXPECT_EQ(simulation.rails_down().size(), 1u);
  EXPECT_GE(simulation.measure_share(2ms, 1), 0.95);
  expect_all_right(simulation);
}

INSTANTIATE_TEST_SUITE_P(, LostRail, testing::Values(Op::read, Op::write),
                         [](const auto& info) { return info.param == Op::read ? "Reads" : "Writes"; });

}  // namespace
}  // namespace kvferry::test
