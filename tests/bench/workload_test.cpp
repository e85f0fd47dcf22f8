// Which slices a case has, the bytes that travel in them, and that no wrong byte goes unseen.
#include "bench/workload.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "bench/data_check.hpp"
#include "bench/latency_stats.hpp"
#include "bench/random.hpp"

namespace kvferry::bench {
namespace {

class EveryPattern : public testing::TestWithParam<Pattern> {};

std::vector<std::uint64_t> sorted_offsets(const std::vector<Slice>& slices, Side side) {
  std::vector<std::uint64_t> offsets;
  for (const Slice& slice : slices) offsets.push_back(offset_on(side, slice));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

TEST_P(EveryPattern, BlocksOfAPartStayInItAndDoNotOverlap) {
  for (const std::uint32_t batch : {1u, 2u, 7u, 160u}) {
    const Workload workload{GetParam(), 24, batch, 3, 42};
    for (std::uint32_t part = 0; part < workload.parts; ++part) {
      const auto slices = make_slices(workload, part);
      ASSERT_EQ(slices.size(), batch);
      for (const Side side : {Side::local, Side::remote}) {
        const auto offsets = sorted_offsets(slices, side);
        EXPECT_GE(offsets.front(), part * workload.part_bytes());
        EXPECT_LE(offsets.back() + 24, (part + 1) * workload.part_bytes());
        for (std::size_t i = 1; i < offsets.size(); ++i) EXPECT_GE(offsets[i], offsets[i - 1] + 24);
      }
    }
  }
}

TEST_P(EveryPattern, TheSameWorkloadGivesTheSameSlices) {
  const Workload workload{GetParam(), 4096, 160, 2, 7};
  EXPECT_EQ(make_slices(workload, 1), make_slices(workload, 1));
}

INSTANTIATE_TEST_SUITE_P(Workload, EveryPattern,
                         testing::Values(Pattern::contiguous, Pattern::strided, Pattern::random),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(Workload, ContiguousMergesToOneAndTheOthersDoNot) {
  const auto merged = [](Pattern pattern) {
    auto slices = make_slices({pattern, 4096, 160, 1, 7}, 0);
    return merge_slices(slices, slices.data());
  };
  EXPECT_EQ(merged(Pattern::contiguous), 1u);
  EXPECT_EQ(merged(Pattern::strided), 160u);
  EXPECT_GT(merged(Pattern::random), 150u);
}

TEST(Workload, RandomDiffersBySideSeedAndPart) {
  const Workload workload{Pattern::random, 4096, 160, 2, 7};
  const auto slices = make_slices(workload, 0);
  EXPECT_TRUE(
      std::any_of(slices.begin(), slices.end(), [](const Slice& s) { return s.local_offset != s.remote_offset; }));
  Workload other = workload;
  other.seed = 8;
  EXPECT_NE(make_slices(other, 0), slices);
  auto second = make_slices(workload, 1);
  for (Slice& slice : second) {
    slice.local_offset -= workload.part_bytes();
    slice.remote_offset -= workload.part_bytes();
  }
  EXPECT_NE(second, slices);
}

/// A destination after a perfect transfer.
std::vector<std::byte> arrived(const Workload& workload, Side side, std::uint64_t round) {
  std::vector<std::byte> region(workload.region_bytes());
  poison_region(region, workload);
  fill_blocks(region, workload, side, round);
  return region;
}

TEST(DataCheck, FindsASingleFlippedBitAnywhere) {
  // An odd block size has a tail that no whole word covers.
  const Workload workload{Pattern::random, 37, 5, 2, 3};
  auto region = arrived(workload, Side::local, 4);
  ASSERT_FALSE(verify_region(region, workload, Side::local, 4));
  for (std::size_t at = 0; at < region.size(); ++at) {
    region[at] ^= std::byte{0x10};
    EXPECT_TRUE(verify_region(region, workload, Side::local, 4)) << "byte " << at;
    region[at] ^= std::byte{0x10};
  }
}

TEST(DataCheck, FindsAFlippedByteBeyondTheFirstRunOfWords) {
  const Workload workload{Pattern::contiguous, 100'003, 2, 1, 3};
  auto region = arrived(workload, Side::local, 0);
  for (const std::size_t at : {0u, 4095u, 4096u, 99'999u, 100'002u, 100'003u, 200'005u}) {
    region[at] = ~region[at];
    const auto mismatch = verify_region(region, workload, Side::local, 0);
    ASSERT_TRUE(mismatch) << at;
    EXPECT_EQ(*mismatch->block, at / 100'003);
    EXPECT_EQ(mismatch->offset, at % 100'003);
    EXPECT_EQ(mismatch->got, region[at]);
    EXPECT_EQ(mismatch->expected, ~region[at]);
    region[at] = ~region[at];
  }
}

TEST(DataCheck, TheReportNamesBlockByteAndValues) {
  const Workload workload{Pattern::contiguous, 64, 4, 1, 3};
  auto region = arrived(workload, Side::local, 0);
  region[2 * 64 + 9] = poison;
  const auto mismatch = verify_region(region, workload, Side::local, 0);
  ASSERT_TRUE(mismatch);
  const std::string text = mismatch->to_string();
  for (const char* part : {"part 0", "block 2", "byte 9", "expected 0x", "got 0xa5", "as before the transfer"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(DataCheck, DataOfAnotherRoundOrSideIsWrong) {
  const Workload workload{Pattern::random, 64, 16, 1, 3};
  const auto region = arrived(workload, Side::local, 1);
  EXPECT_TRUE(verify_region(region, workload, Side::local, 0));
  EXPECT_TRUE(verify_region(region, workload, Side::remote, 1));
}

TEST(DataCheck, SwappedBlocksAreWrong) {
  const Workload workload{Pattern::contiguous, 64, 2, 1, 3};
  auto region = arrived(workload, Side::local, 1);
  std::swap_ranges(region.begin(), region.begin() + 64, region.begin() + 64);
  const auto mismatch = verify_region(region, workload, Side::local, 1);
  ASSERT_TRUE(mismatch);
  EXPECT_EQ(*mismatch->block, 0u);
}

TEST(LatencyStats, QuantilesAreGoodToHalfAPercent) {
  LatencyStats stats;
  for (std::uint64_t i = 1; i <= 100'000; ++i) stats.record(i * 37);
  EXPECT_EQ(stats.count(), 100'000u);
  EXPECT_NEAR(stats.quantile_us(0.5), 1850, 1850 * 0.005);
  EXPECT_NEAR(stats.quantile_us(0.99), 3663, 3663 * 0.005);
  EXPECT_NEAR(stats.average_us(), 1850.02, 0.01);
  EXPECT_EQ(stats.max_us(), 3700);
  EXPECT_LE(stats.quantile_us(1), stats.max_us());
}

TEST(LatencyStats, SmallAndHugeValuesKeepTheirPlace) {
  LatencyStats stats;
  EXPECT_EQ(stats.quantile_us(0.5), 0);
  stats.record(0);
  EXPECT_EQ(stats.quantile_us(0.5), 0);
  stats.record(UINT64_MAX);
  EXPECT_NEAR(stats.quantile_us(1), static_cast<double>(UINT64_MAX) / 1e3, 1e14);
}

TEST(Random, ShuffleKeepsEveryElement) {
  std::vector<int> items(1000);
  for (int i = 0; i < 1000; ++i) items[static_cast<std::size_t>(i)] = i;
  const std::vector<int> original = items;
  Random random(5);
  shuffle(items, random);
  EXPECT_NE(items, original);
  std::sort(items.begin(), items.end());
  EXPECT_EQ(items, original);
}

}  // namespace
}  // namespace kvferry::bench
