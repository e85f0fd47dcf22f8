#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/runtime/slice.hpp>

namespace kvferry {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint64_t region_bytes = 4096;

std::vector<Slice> merged(std::vector<Slice> slices) {
  slices.resize(merge_slices(slices, slices.data()));
  return slices;
}

std::vector<SliceRange> cut(std::span<const Slice> slices, std::uint64_t max_bytes, std::uint32_t max_slices,
                            std::uint64_t whole_bytes) {
  SliceCursor cursor(slices);
  std::vector<SliceRange> ranges;
  while (!cursor.at_end()) ranges.push_back(cursor.next(max_bytes, max_slices, whole_bytes));
  return ranges;
}

std::vector<std::uint64_t> sizes_of(const std::vector<SliceRange>& ranges) {
  std::vector<std::uint64_t> sizes;
  for (const SliceRange& range : ranges) sizes.push_back(range.bytes);
  return sizes;
}

TEST(Fits, SurvivesOverflow) {
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  EXPECT_TRUE(fits(0, 0, 0));
  EXPECT_TRUE(fits(10, 0, 10));
  EXPECT_TRUE(fits(0, most, most));
  EXPECT_FALSE(fits(11, 0, 10));
  EXPECT_FALSE(fits(1, most, 10));
  EXPECT_FALSE(fits(most, 2, 10));
}

TEST(MergeSlices, JoinsNeighboursThatTouchOnBothSides) {
  EXPECT_EQ(merged({{0, 100, 10}, {10, 110, 20}, {30, 130, 1}}), (std::vector<Slice>{{0, 100, 31}}));
}

TEST(MergeSlices, KeepsNeighboursThatTouchOnOneSideOnly) {
  const std::vector<Slice> slices{{0, 100, 10}, {10, 120, 10}, {30, 130, 10}};
  EXPECT_EQ(merged(slices), slices);
}

TEST(MergeSlices, LeavesOutEmptySlices) {
  EXPECT_EQ(merged({{5, 5, 0}, {0, 0, 4}, {9, 9, 0}, {4, 4, 4}, {1, 1, 0}}), (std::vector<Slice>{{0, 0, 8}}));
  EXPECT_TRUE(merged({}).empty());
  EXPECT_TRUE(merged({{1, 2, 0}, {3, 4, 0}}).empty());
}

TEST(MergeSlices, KeepsTheOrderThatWasAskedFor) {
  const std::vector<Slice> backwards{{20, 20, 10}, {10, 10, 10}, {0, 0, 10}};
  EXPECT_EQ(merged(backwards), backwards);
}

TEST(MergeSlices, NeverJoinsIntoALengthThatWraps) {
  constexpr std::uint64_t half = std::uint64_t{1} << 63;
  const std::vector<Slice> slices{{0, 0, half}, {half, half, half}};
  EXPECT_EQ(merged(slices), slices);
}

TEST(MergeSlices, JoinsAWholeBatchOfBlocks) {
  std::vector<Slice> slices;
  for (std::uint64_t i = 0; i < 112'000; ++i) slices.push_back({i * 2048, i * 2048, 2048});
  EXPECT_EQ(merged(slices), (std::vector<Slice>{{0, 0, 112'000 * std::uint64_t{2048}}}));
}

TEST(SliceCursor, GathersSmallSlicesWithoutCuttingThem) {
  const std::vector<Slice> slices{{0, 0, 400}, {1000, 0, 400}, {2000, 0, 400}, {3000, 0, 100}};
  EXPECT_EQ(sizes_of(cut(slices, 1000, 16, 512)), (std::vector<std::uint64_t>{800, 500}));
}

TEST(SliceCursor, CutsLargeSlicesAtTheLimit) {
  const std::vector<Slice> slices{{0, 0, 400}, {1000, 0, 2500}};
  EXPECT_EQ(sizes_of(cut(slices, 1000, 16, 512)), (std::vector<std::uint64_t>{1000, 1000, 900}));
}

TEST(SliceCursor, CutsAWholeSliceOnlyWhenItIsAloneLargerThanTheLimit) {
  const std::vector<Slice> slices{{0, 0, 10}, {1000, 0, 2500}};
  EXPECT_EQ(sizes_of(cut(slices, 1000, 16, 4096)), (std::vector<std::uint64_t>{10, 1000, 1000, 500}));
}

TEST(SliceCursor, KeepsToTheNumberOfSlices) {
  const std::vector<Slice> slices(10, Slice{0, 0, 1});
  EXPECT_EQ(sizes_of(cut(slices, 1000, 4, 512)), (std::vector<std::uint64_t>{4, 4, 2}));
}

TEST(SliceCursor, MakesProgressWhateverTheLimits) {
  const std::vector<Slice> slices{{0, 0, 2}, {10, 10, 1}};
  EXPECT_EQ(sizes_of(cut(slices, 0, 0, 0)), (std::vector<std::uint64_t>{1, 1, 1}));
}

TEST(SliceCursor, IsEmptyAtTheEnd) {
  SliceCursor cursor;
  EXPECT_TRUE(cursor.at_end());
  EXPECT_EQ(cursor.next(10, 10, 10), SliceRange{});
}

TEST(SliceCursor, CarriesLengthsOverFourGigabytes) {
  constexpr std::uint64_t large = (std::uint64_t{5} << 30) + 3;
  const std::vector<Slice> slices{{1, 2, large}};
  const std::vector<SliceRange> ranges = cut(slices, std::uint64_t{1} << 30, 16, 65536);
  ASSERT_EQ(ranges.size(), 6u);
  EXPECT_EQ(ranges.back().bytes, 3u);
  ranges.back().for_each([](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
    EXPECT_EQ(local, 1 + (std::uint64_t{5} << 30));
    EXPECT_EQ(remote, 2 + (std::uint64_t{5} << 30));
    EXPECT_EQ(length, 3u);
  });
}

// ---- properties, on random slices

class RandomSlices : public ::testing::TestWithParam<unsigned> {
 protected:
  // Half of the slices go on where the one before ended, so that merging has something to do.
  std::vector<Slice> make() {
    std::vector<Slice> slices(random_() % 60);
    Slice before;
    for (Slice& slice : slices) {
      slice.length = random_() % 5 == 0 ? 0 : random_() % 300;
      slice.local_offset = before.local_offset + before.length;
      slice.remote_offset = before.remote_offset + before.length;
      const bool jump = random_() % 2 == 0 || slice.local_offset + slice.length > region_bytes ||
                        slice.remote_offset + slice.length > region_bytes;
      if (jump) {
        slice.local_offset = random_() % (region_bytes - slice.length);
        slice.remote_offset = random_() % (region_bytes - slice.length);
      }
      before = slice;
    }
    return slices;
  }

  Bytes make_remote() {
    Bytes bytes(region_bytes);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random_());
    return bytes;
  }

  std::mt19937 random_{GetParam()};
};

Bytes read_naively(const std::vector<Slice>& slices, const Bytes& remote) {
  Bytes local(region_bytes);
  for (const Slice& slice : slices)
    for (std::uint64_t i = 0; i < slice.length; ++i) local[slice.local_offset + i] = remote[slice.remote_offset + i];
  return local;
}

Bytes read_by_ranges(const std::vector<SliceRange>& ranges, const Bytes& remote) {
  Bytes local(region_bytes);
  for (const SliceRange& range : ranges)
    range.for_each([&](std::uint64_t to, std::uint64_t from, std::uint64_t length) {
      EXPECT_GT(length, 0u);
      std::copy_n(remote.begin() + static_cast<std::ptrdiff_t>(from), length,
                  local.begin() + static_cast<std::ptrdiff_t>(to));
    });
  return local;
}

TEST_P(RandomSlices, MergedAndCutTheyCarryTheSameBytes) {
  const std::vector<Slice> slices = make();
  const Bytes remote = make_remote();
  const std::vector<Slice> few = merged(slices);
  EXPECT_LE(few.size(), slices.size());
  for (const std::uint64_t max_bytes : {1u, 7u, 64u, 1000u, 100'000u})
    for (const std::uint32_t max_slices : {1u, 3u, 1000u})
      for (const std::uint64_t whole_bytes : {0u, 50u, 1000u}) {
        const auto ranges = cut(few, max_bytes, max_slices, whole_bytes);
        EXPECT_EQ(read_by_ranges(ranges, remote), read_naively(slices, remote));
      }
}

TEST_P(RandomSlices, RangesKeepToTheirLimits) {
  const std::vector<Slice> slices = merged(make());
  constexpr std::uint64_t max_bytes = 256;
  constexpr std::uint64_t whole_bytes = 128;
  for (const SliceRange& range : cut(slices, max_bytes, 3, whole_bytes)) {
    EXPECT_GT(range.bytes, 0u);
    EXPECT_LE(range.bytes, max_bytes);
    EXPECT_LE(range.count, 3u);
    EXPECT_TRUE(range.skip == 0 || range.first->length > whole_bytes) << "a whole slice was cut";
  }
}

TEST_P(RandomSlices, FrontsTogetherAreTheWhole) {
  const std::vector<Slice> slices = make();
  for (const std::uint64_t max_bytes : {1u, 100u, 5000u})
    for (const std::uint32_t max_pieces : {1u, 3u, 1000u}) {
      SliceRange left{slices.data(), static_cast<std::uint32_t>(slices.size()), 0, 0};
      for (const Slice& slice : slices) left.bytes += slice.length;
      std::vector<std::uint64_t> seen;
      while (left.bytes > 0) {
        const SliceRange front = take_front(left, max_pieces, max_bytes);
        ASSERT_GT(front.bytes, 0u);
        ASSERT_LE(front.bytes, max_bytes);
        std::uint32_t pieces = 0;
        front.for_each([&](std::uint64_t local, std::uint64_t, std::uint64_t length) {
          ++pieces;
          for (std::uint64_t i = 0; i < length; ++i) seen.push_back(local + i);
        });
        ASSERT_LE(pieces, max_pieces);
      }
      std::vector<std::uint64_t> expected;
      for (const Slice& slice : slices)
        for (std::uint64_t i = 0; i < slice.length; ++i) expected.push_back(slice.local_offset + i);
      ASSERT_EQ(seen, expected);
    }
}

TEST(TakeFront, LimitsOfNothingTakeNothing) {
  const Slice slice{0, 0, 10};
  SliceRange range{&slice, 1, 0, 10};
  EXPECT_EQ(take_front(range, 0, 10).bytes, 0u);
  EXPECT_EQ(take_front(range, 1, 0).bytes, 0u);
  EXPECT_EQ(range.bytes, 10u);
}

TEST_P(RandomSlices, MergingInPlaceEqualsMergingElsewhere) {
  const std::vector<Slice> slices = make();
  std::vector<Slice> elsewhere(slices.size());
  elsewhere.resize(merge_slices(slices, elsewhere.data()));
  EXPECT_EQ(merged(slices), elsewhere);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomSlices, ::testing::Range(0u, 40u));

}  // namespace
}  // namespace kvferry
