// Ranges and checksums of blocks against walks over single vectors, on random layouts.
#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include <kvferry/kvcache/block_checksum.hpp>
#include <kvferry/kvcache/block_ranges.hpp>

#include "tests/kvcache/random_layout.hpp"

namespace kvferry {
namespace {

struct Cache {
  Placement place;
  std::uint64_t element = 0;
};

Cache cache_of(const Layout& layout, Payload payload) {
  const LayoutSpec& spec = layout.spec();
  if (payload == Payload::scales) return {spec.scales->placement, dtype_bytes(spec.scales->dtype)};
  return {spec.values, layout.head_bytes()};
}

TEST(BlockRanges, AreExactlyTheBytesOfTheBlocks) {
  Random random(11);
  for (int round = 0; round < 300; ++round) {
    const Layout layout = random_pair(random).first;
    const Payload payload = layout.spec().scales && random.below(2) == 0 ? Payload::scales : Payload::values;
    const Cache cache = cache_of(layout, payload);
    const std::uint32_t tokens = layout.spec().block_tokens * pick(random, 1, layout.spec().blocks);
    const std::vector<BlockId> blocks = random_table(random, layout, tokens);
    const std::uint32_t first = pick(random, 0, layout.spec().layers - 1);
    const IndexRange layers{first, pick(random, first + 1, layout.spec().layers)};

    std::vector<bool> expected(cache.place.region_bytes);
    for (std::uint32_t layer = layers.first; layer < layers.end; ++layer)
      for (std::uint32_t part = 0; part < layout.parts(); ++part)
        for (const BlockId block : blocks)
          for (std::uint32_t token = 0; token < layout.spec().block_tokens; ++token)
            for (std::uint32_t head = 0; head < layout.local_heads(); ++head) {
              const std::uint64_t at = payload == Payload::scales
                                           ? layout.scale_address(layer, static_cast<Part>(part), block, token, head)
                                           : layout.address(layer, static_cast<Part>(part), block, token, head);
              std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(at), cache.element, true);
            }

    const RangeSet set(block_ranges(layout, blocks, layers, payload).value());
    std::vector<bool> covered(cache.place.region_bytes);
    for (const ByteRange& range : set.ranges()) {
      ASSERT_LE(range.offset + range.length, covered.size());
      std::fill_n(covered.begin() + static_cast<std::ptrdiff_t>(range.offset), range.length, true);
    }
    ASSERT_EQ(covered, expected) << "round " << round;
  }
}

TEST(BlockRanges, AreAsLongAsTheLayoutAllows) {
  const Layout layer_first =
      packed_layout({"model", 4, 8, 64}, {.block_tokens = 16, .blocks = 10}, page_order::vllm_nhd).value();
  EXPECT_EQ(block_ranges(layer_first, std::vector<BlockId>{3, 7}, {0, 4})->size(), 4u * 2 * 2);
  const Layout block_first =
      packed_layout({"model", 4, 8, 64}, {.block_tokens = 16, .blocks = 10}, page_order::vllm_block_first_nhd).value();
  EXPECT_EQ(block_ranges(block_first, std::vector<BlockId>{3, 7}, {0, 4})->size(), 2u);
  EXPECT_EQ(block_ranges(block_first, std::vector<BlockId>{3, 7}, {1, 1})->size(), 0u);
}

TEST(BlockRanges, RefuseWhatIsNotThere) {
  const Layout layout =
      packed_layout({"model", 4, 8, 64}, {.block_tokens = 16, .blocks = 10}, page_order::vllm_nhd).value();
  EXPECT_EQ(block_ranges(layout, std::vector<BlockId>{10}, {0, 4}).status().code(), Errc::out_of_bounds);
  EXPECT_EQ(block_ranges(layout, std::vector<BlockId>{1}, {0, 5}).status().code(), Errc::out_of_bounds);
  EXPECT_EQ(block_ranges(layout, std::vector<BlockId>{1}, {2, 1}).status().code(), Errc::invalid_argument);
  EXPECT_EQ(block_ranges(layout, std::vector<BlockId>{1}, {0, 1}, Payload::scales).status().code(),
            Errc::invalid_argument);
}

/// A pair of ranks that exchange heads, the plan between them, and both memories after it was carried out.
struct Exchange {
  explicit Exchange(Random& random) : layouts(random_pair(random)) {
    destination_rank = pick(random, 0, layouts.second.spec().tp_size - 1);
    const auto ranks = source_ranks_of(layouts.first, layouts.second, destination_rank);
    source_rank = ranks[random.below(ranks.size())];
    tokens.first = pick(random, 0, 23);
    tokens.end = pick(random, tokens.first + 1, 24);
    from = random_table(random, layouts.first, 24);
    to = random_table(random, layouts.second, 24);
    source = random_bytes(random, layouts.first.spec().values.region_bytes);
    destination = random_bytes(random, layouts.second.spec().values.region_bytes);
    const auto plan = make_plan({.source = {&layouts.first, from, source_rank},
                                 .destination = {&layouts.second, to, destination_rank},
                                 .tokens = tokens,
                                 .layers = {0, layouts.first.spec().layers}})
                          .value();
    for (const Slice& slice : plan)
      std::memcpy(destination.data() + slice.local_offset, source.data() + slice.remote_offset, slice.length);
    const HeadRange here = layouts.first.heads_of(source_rank);
    const HeadRange there = layouts.second.heads_of(destination_rank);
    heads.first = std::max(here.first, there.first);
    heads.count = std::min(here.end(), there.end()) - heads.first;
  }

  std::vector<std::uint64_t> sums(bool of_source, std::uint32_t layer) const {
    ChecksumRequest request;
    request.side =
        of_source ? PlanSide{&layouts.first, from, source_rank} : PlanSide{&layouts.second, to, destination_rank};
    request.tokens = tokens;
    request.unit_tokens = layouts.second.spec().block_tokens;
    request.heads = heads;
    return block_checksums(request, layer, std::as_bytes(std::span(of_source ? source : destination))).value();
  }

  std::pair<Layout, Layout> layouts;
  std::uint32_t source_rank = 0;
  std::uint32_t destination_rank = 0;
  IndexRange tokens;
  std::vector<BlockId> from;
  std::vector<BlockId> to;
  HeadRange heads;
  std::vector<std::uint8_t> source;
  std::vector<std::uint8_t> destination;
};

TEST(BlockChecksums, AreTheSameAtBothEndsWhateverTheLayouts) {
  Random random(12);
  for (int round = 0; round < 300; ++round) {
    const Exchange exchange(random);
    for (std::uint32_t layer = 0; layer < exchange.layouts.first.spec().layers; ++layer)
      ASSERT_EQ(exchange.sums(true, layer), exchange.sums(false, layer)) << "round " << round;
  }
}

TEST(BlockChecksums, TellWhichBlockAWrongByteIsIn) {
  Random random(13);
  for (int round = 0; round < 200; ++round) {
    Exchange exchange(random);
    const Layout& layout = exchange.layouts.second;
    const std::uint32_t layer = pick(random, 0, layout.spec().layers - 1);
    const std::uint32_t token = pick(random, exchange.tokens.first, exchange.tokens.end - 1);
    const std::uint32_t block_tokens = layout.spec().block_tokens;
    const std::uint32_t head = exchange.heads.first + pick(random, 0, exchange.heads.count - 1) -
                               layout.heads_of(exchange.destination_rank).first;
    const std::uint64_t at = layout.address(layer, static_cast<Part>(random.below(layout.parts())),
                                            exchange.to[token / block_tokens], token % block_tokens, head);
    exchange.destination[at + random.below(layout.head_bytes())] ^= 0x10;
    const std::vector<std::uint64_t> sent = exchange.sums(true, layer);
    const std::vector<std::uint64_t> arrived = exchange.sums(false, layer);
    ASSERT_EQ(sent.size(), arrived.size());
    for (std::size_t i = 0; i < sent.size(); ++i)
      ASSERT_EQ(sent[i] != arrived[i], exchange.tokens.first / block_tokens + i == token / block_tokens) << i;
  }
}

TEST(BlockChecksums, BelongToTheirLayerAndPlace) {
  const Layout layout =
      packed_layout({"model", 2, 1, 4}, {.block_tokens = 4, .blocks = 4}, page_order::vllm_nhd).value();
  const std::vector<std::byte> zeros(layout.spec().values.region_bytes);
  const std::vector<BlockId> blocks{0, 1};
  const ChecksumRequest request{.side = {&layout, blocks, 0}, .tokens = {0, 8}, .unit_tokens = 4, .heads = {0, 1}};
  const auto first = block_checksums(request, 0, zeros).value();
  const auto second = block_checksums(request, 1, zeros).value();
  EXPECT_NE(first[0], first[1]) << "the same bytes at another place of the sequence";
  EXPECT_NE(first[0], second[0]) << "the same bytes in another layer";
}

TEST(BlockChecksums, RefuseWhatIsNotThere) {
  const Layout layout =
      packed_layout({"model", 2, 4, 4}, {.block_tokens = 4, .blocks = 4, .tp_size = 2}, page_order::vllm_nhd).value();
  const std::vector<std::byte> region(layout.spec().values.region_bytes);
  const std::vector<BlockId> blocks{0, 1};
  const ChecksumRequest good{.side = {&layout, blocks, 1}, .tokens = {0, 8}, .unit_tokens = 4, .heads = {2, 2}};
  EXPECT_EQ(block_checksums(good, 0, region)->size(), 2u);
  EXPECT_EQ(block_checksums(good, 2, region).status().code(), Errc::out_of_bounds);
  EXPECT_EQ(block_checksums(good, 0, std::span(region).first(region.size() - 1)).status().code(), Errc::out_of_bounds);
  ChecksumRequest other_heads = good;
  other_heads.heads = {0, 2};
  EXPECT_EQ(block_checksums(other_heads, 0, region).status().code(), Errc::out_of_bounds);
  ChecksumRequest too_long = good;
  too_long.tokens = {0, 9};
  EXPECT_EQ(block_checksums(too_long, 0, region).status().code(), Errc::out_of_bounds);
  ChecksumRequest no_unit = good;
  no_unit.unit_tokens = 0;
  EXPECT_EQ(block_checksums(no_unit, 0, region).status().code(), Errc::invalid_argument);
}

}  // namespace
}  // namespace kvferry
