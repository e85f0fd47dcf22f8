#include <cstdint>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/runtime/range_set.hpp>

namespace kvferry {
namespace {

TEST(RangeSet, JoinsWhatTouchesAndLeavesOutWhatIsEmpty) {
  const RangeSet set({{30, 5}, {0, 10}, {10, 2}, {50, 0}, {32, 8}, {1, 3}});
  const std::vector<ByteRange> expected{{0, 12}, {30, 10}};
  EXPECT_EQ(std::vector(set.ranges().begin(), set.ranges().end()), expected);
  EXPECT_EQ(set.end(), 40u);
  EXPECT_EQ(RangeSet().end(), 0u);
}

// Against a map of single bytes, with questions in any order sharing one hint.
TEST(RangeSet, CoversExactlyItsBytes) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<bool> bytes(200);
    std::vector<ByteRange> ranges;
    for (unsigned i = random() % 12; i > 0; --i) {
      const ByteRange range{random() % 180, random() % 20};
      for (std::uint64_t at = range.offset; at < range.offset + range.length; ++at) bytes[at] = true;
      ranges.push_back(range);
    }
    const RangeSet set(ranges);
    std::size_t hint = 0;
    for (int question = 0; question < 300; ++question) {
      const std::uint64_t offset = random() % 200;
      const std::uint64_t length = random() % (201 - offset);
      bool expected = true;
      for (std::uint64_t at = offset; at < offset + length; ++at) expected = expected && bytes[at];
      ASSERT_EQ(set.covers(offset, length, hint), expected) << offset << " + " << length;
      ASSERT_EQ(set.covers(offset, length), expected);
    }
    ASSERT_FALSE(set.covers(UINT64_MAX, 1));
    ASSERT_FALSE(set.covers(1, UINT64_MAX));
  }
}

TEST(RangeSet, TravelsInPortions) {
  const RangeSet set({{1, 2}, {UINT64_MAX - 4, 3}, {100, 200}});
  std::vector<ByteRange> arrived;
  for (std::size_t first = 0; first < 4; first += 2) {
    const std::string bytes = set.encode(first, 2);
    ASSERT_TRUE(RangeSet::decode(std::as_bytes(std::span(bytes)), arrived));
  }
  EXPECT_EQ(arrived, std::vector(set.ranges().begin(), set.ranges().end()));
  EXPECT_TRUE(set.encode(3, 5).empty());
}

TEST(RangeSet, RefusesWhatIsNoRange) {
  std::vector<ByteRange> arrived;
  const std::string cut(15, '\0');
  EXPECT_EQ(RangeSet::decode(std::as_bytes(std::span(cut)), arrived).code(), Errc::malformed);
  const std::string beyond(16, '\xff');
  EXPECT_EQ(RangeSet::decode(std::as_bytes(std::span(beyond)), arrived).code(), Errc::malformed);
}

}  // namespace
}  // namespace kvferry
