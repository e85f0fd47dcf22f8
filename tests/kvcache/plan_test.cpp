#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/kvcache/plan.hpp>

#include "tests/kvcache/random_layout.hpp"

namespace kvferry {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr ModelShape small_model{"small", 2, 4, 8};

Layout layout(const DimOrder& order, PageOptions options = {.block_tokens = 4, .blocks = 8}) {
  return packed_layout(small_model, options, order).value();
}

/// A plan over two given layouts; what a test does not care for has a default.
struct Case {
  Layout source;
  Layout destination;
  std::vector<BlockId> source_blocks{0, 1, 2};
  std::vector<BlockId> destination_blocks{0, 1, 2};
  std::uint32_t source_rank = 0;
  std::uint32_t destination_rank = 0;
  IndexRange tokens{0, 8};
  IndexRange layers{0, 2};
  Initiator initiator = Initiator::destination;
  Payload payload = Payload::values;

  PlanRequest request() const {
    return {{&source, source_blocks, source_rank},
            {&destination, destination_blocks, destination_rank},
            tokens,
            layers,
            initiator,
            payload};
  }
  Result<std::vector<Slice>> plan() const { return make_plan(request()); }
};

void expect_error(const Status& status, Errc code, std::string_view part) {
  EXPECT_TRUE(status == code) << status.to_string();
  EXPECT_NE(status.text().find(part), std::string_view::npos) << status.text() << "\nshould name: " << part;
}

std::vector<std::uint64_t> repeated(int count, int length) {
  return std::vector<std::uint64_t>(static_cast<std::size_t>(count), static_cast<std::uint64_t>(length));
}

std::vector<std::uint64_t> lengths(const Case& one) {
  std::vector<std::uint64_t> found;
  const auto slices = one.plan();
  EXPECT_TRUE(slices) << slices.status().to_string();
  for (const Slice& slice : slices.value()) found.push_back(slice.length);
  return found;
}

// ---------------------------------------------------------------- how far a run reaches

TEST(Plan, WholePoolsOfOneShapeAreOneSlice) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd)};
  one.source_blocks = one.destination_blocks = {0, 1, 2, 3, 4, 5, 6, 7};
  one.tokens = {0, 32};
  EXPECT_EQ(one.plan().value(), (std::vector<Slice>{{0, 0, one.source.spec().values.region_bytes}}));
}

TEST(Plan, ScatteredBlocksAreASliceForEachLayerAndPart) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd)};
  one.source_blocks = {7, 2};
  one.destination_blocks = {1, 5};
  EXPECT_EQ(lengths(one), repeated(2 * 2 * 2, 4 * 4 * 16)) << "layers x parts x blocks";
}

TEST(Plan, NeighbouringBlocksAreMerged) {
  Case one{layout(page_order::vllm_hnd), layout(page_order::vllm_hnd)};
  one.source_blocks = {5, 6};
  one.destination_blocks = {1, 2};
  EXPECT_EQ(lengths(one), repeated(2 * 2, 2 * 4 * 4 * 16));
}

TEST(Plan, NeighboursThatComeBackwardsAreMergedToo) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd)};
  one.source_blocks = {6, 5};
  one.destination_blocks = {2, 1};
  EXPECT_EQ(lengths(one), repeated(2 * 2, 2 * 4 * 4 * 16));
}

TEST(Plan, BlockFirstMovesAllLayersOfABlockAtOnce) {
  Case one{layout(page_order::vllm_block_first_nhd), layout(page_order::vllm_block_first_nhd)};
  one.source_blocks = {7, 2};
  one.destination_blocks = {1, 5};
  EXPECT_EQ(lengths(one), (std::vector{one.source.block_bytes(), one.source.block_bytes()}));
  one.layers = {1, 2};
  EXPECT_EQ(lengths(one), (std::vector{one.source.block_bytes() / 2, one.source.block_bytes() / 2}));
}

TEST(Plan, OtherOrdersOfHeadsAndTokensBreakRunsToOneHead) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_hnd)};
  one.tokens = {0, 4};
  one.layers = {0, 1};
  EXPECT_EQ(lengths(one), repeated(2 * 4 * 4, 16)) << "parts x tokens x heads";
}

TEST(Plan, OtherBlockSizesCutAtTheSmaller) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd, {.block_tokens = 8, .blocks = 4})};
  one.source_blocks = {6, 3};
  one.destination_blocks = {2};
  one.layers = {0, 1};
  EXPECT_EQ(lengths(one), repeated(2 * 2, 4 * 4 * 16));
  one.source_blocks = {3, 4};
  EXPECT_EQ(lengths(one), repeated(2, 8 * 4 * 16)) << "neighbours fill the larger block at once";
}

TEST(Plan, TheInitiatorsOffsetsAreLocal) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd)};
  one.source_blocks = {7};
  one.destination_blocks = {1};
  one.tokens = {1, 3};
  one.layers = {1, 2};
  constexpr std::uint64_t two_tokens = 128;  // of 4 heads of 16 bytes
  const std::uint64_t from = one.source.address(1, Part::k, 7, 1, 0);
  const std::uint64_t to = one.destination.address(1, Part::k, 1, 1, 0);
  EXPECT_EQ(one.plan().value().front(), (Slice{to, from, two_tokens}));
  one.initiator = Initiator::source;
  EXPECT_EQ(one.plan().value().front(), (Slice{from, to, two_tokens}));
}

TEST(Plan, MlaIsALayoutLikeAnyOther) {
  const ModelShape mla = find_model_shape("deepseek-v3").value();
  Case one{packed_layout(mla, {.block_tokens = 64, .blocks = 3}, page_order::vllm_nhd).value(),
           packed_layout(mla, {.block_tokens = 64, .blocks = 3, .tp_size = 8}, page_order::vllm_nhd).value()};
  one.source_blocks = {2};
  one.destination_blocks = {0};
  one.tokens = {0, 64};
  one.layers = {0, 61};
  for (one.destination_rank = 0; one.destination_rank < 8; ++one.destination_rank)
    EXPECT_EQ(lengths(one), repeated(61, 72 * 1024)) << "every rank needs the whole latent";
}

TEST(Plan, EmptyRangesAreEmptyPlans) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd)};
  one.tokens = {3, 3};
  EXPECT_TRUE(lengths(one).empty());
  one.tokens = {0, 8};
  one.layers = {1, 1};
  EXPECT_TRUE(lengths(one).empty());
}

// ---------------------------------------------------------------- refusals

TEST(PlanRefusals, BadInputIsNamed) {
  const Case good{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd)};
  ASSERT_TRUE(good.plan());
  const auto outcome = [&](auto&& change) {
    Case bad = good;
    change(bad);
    return bad.plan().status();
  };
  expect_error(outcome([](Case& c) { c.source_blocks[1] = 8; }), Errc::out_of_bounds,
               "block 8 of the source, whose pool has 8");
  expect_error(outcome([](Case& c) { c.destination_blocks[0] = ~0u; }), Errc::out_of_bounds,
               "block 4294967295 of the destination");
  expect_error(outcome([](Case& c) { c.source_blocks.resize(1); }), Errc::out_of_bounds,
               "the source's 1 blocks of 4 tokens end before token 8");
  expect_error(outcome([](Case& c) { c.destination_blocks.clear(); }), Errc::out_of_bounds,
               "the destination's 0 blocks");
  expect_error(outcome([](Case& c) {
                 c.destination_blocks = {3, 3};
               }),
               Errc::invalid_argument, "block 3 is twice in the destination's block table");
  expect_error(outcome([](Case& c) { c.tokens = {5, 4}; }), Errc::invalid_argument, "token range [5, 4)");
  expect_error(outcome([](Case& c) { c.layers = {2, 1}; }), Errc::invalid_argument, "layer range [2, 1)");
  expect_error(outcome([](Case& c) { c.layers = {0, 3}; }), Errc::out_of_bounds, "layers [0, 3) of a model with 2");
  expect_error(outcome([](Case& c) { c.source_rank = 1; }), Errc::invalid_argument, "the source's rank 1");
  expect_error(outcome([](Case& c) { c.destination_rank = 9; }), Errc::invalid_argument, "the destination's rank 9");
  expect_error(outcome([](Case& c) { c.payload = Payload::scales; }), Errc::invalid_argument, "scales are asked for");
  expect_error(
      outcome([](Case& c) { c.destination = layout(page_order::vllm_nhd, {.blocks = 8, .dtype = DType::fp32}); }),
      Errc::unsupported, "dtype is bf16 at the source and fp32");
  expect_error(make_plan({}).status(), Errc::invalid_argument, "the source has no layout");
}

TEST(PlanRefusals, BlocksOutsideTheTokenRangeAreNotLookedAt) {
  Case one{layout(page_order::vllm_nhd), layout(page_order::vllm_nhd)};
  one.source_blocks = {99, 1, 99};
  one.destination_blocks = {99, 2, 99};
  one.tokens = {4, 8};
  EXPECT_TRUE(one.plan()) << one.plan().status().to_string();
}

// ---------------------------------------------------------------- tensor parallelism

Layout with_heads(std::uint32_t heads, std::uint32_t tp_size) {
  return packed_layout({"model", 1, heads, 8}, {.block_tokens = 4, .blocks = 8, .tp_size = tp_size},
                       page_order::vllm_nhd)
      .value();
}

TEST(PlanRanks, EveryHeadComesOnceToEveryRankThatHoldsIt) {
  const std::uint32_t sizes[] = {1, 2, 3, 4, 6, 8, 12, 16, 24};
  for (const std::uint32_t heads : {1u, 2u, 4u, 6u, 8u})
    for (const std::uint32_t from : sizes)
      for (const std::uint32_t to : sizes) {
        const auto divides = [&](std::uint32_t tp) { return heads % tp == 0 || tp % heads == 0; };
        if (!divides(from) || !divides(to)) continue;
        const Layout source = with_heads(heads, from);
        const Layout destination = with_heads(heads, to);
        for (std::uint32_t rank = 0; rank < to; ++rank) {
          std::vector<std::uint32_t> got;
          for (const std::uint32_t sender : source_ranks_of(source, destination, rank)) {
            const HeadRange sent = source.heads_of(sender);
            for (std::uint32_t head = sent.first; head < sent.end(); ++head) got.push_back(head);
          }
          std::ranges::sort(got);
          EXPECT_EQ(std::ranges::adjacent_find(got), got.end()) << "a head is sent twice";
          const HeadRange need = destination.heads_of(rank);
          for (std::uint32_t head = need.first; head < need.end(); ++head)
            EXPECT_TRUE(std::ranges::binary_search(got, head)) << head << " is lacking";
        }
      }
}

TEST(PlanRanks, EqualSizesPairEqualRanks) {
  for (const std::uint32_t heads : {1u, 4u, 8u})
    for (std::uint32_t rank = 0; rank < 8; ++rank)
      EXPECT_EQ(source_ranks_of(with_heads(heads, 8), with_heads(heads, 8), rank), std::vector<std::uint32_t>{rank});
}

TEST(PlanRanks, DestinationsSpreadOverTheReplicas) {
  const auto senders = [](std::uint32_t heads, std::uint32_t from, std::uint32_t to, std::uint32_t rank) {
    return source_ranks_of(with_heads(heads, from), with_heads(heads, to), rank);
  };
  using Ranks = std::vector<std::uint32_t>;
  EXPECT_EQ(senders(4, 8, 4, 1), Ranks{2}) << "the first replica sends";
  EXPECT_EQ(senders(4, 4, 8, 3), Ranks{1}) << "both ranks that hold head 1 get it from the one that has it";
  EXPECT_EQ(senders(4, 8, 2, 1), (Ranks{4, 6}));
  EXPECT_EQ(senders(1, 2, 4, 1), Ranks{0});
  EXPECT_EQ(senders(1, 2, 4, 2), Ranks{1});
  EXPECT_EQ(senders(1, 4, 2, 1), Ranks{2});
}

TEST(PlanRanks, ARankThatSendsNothingHasAnEmptyPlan) {
  Case one{layout(page_order::vllm_nhd, {.block_tokens = 4, .blocks = 8, .tp_size = 8}),
           layout(page_order::vllm_nhd, {.block_tokens = 4, .blocks = 8, .tp_size = 4})};
  EXPECT_FALSE(lengths(one).empty());
  one.source_rank = 1;
  EXPECT_TRUE(lengths(one).empty()) << "a replica of what rank 0 sends";
  one.source_rank = 2;
  EXPECT_TRUE(lengths(one).empty()) << "another head";
}

// ---------------------------------------------------------------- properties, on random layouts

/// One case; what it holds follows from the seed alone.
class RandomPlan {
 public:
  explicit RandomPlan(std::uint64_t seed) : random_(seed), layouts_(random_pair(random_)) {
    const std::uint32_t length = pick(random_, 1, 24);
    tokens_.first = static_cast<std::uint32_t>(random_.below(length));
    tokens_.end = pick(random_, tokens_.first, length);
    const std::uint32_t layers = layouts_.first.spec().layers;
    layers_.first = static_cast<std::uint32_t>(random_.below(layers));
    layers_.end = pick(random_, layers_.first, layers);
    if (random_.below(2) == 0) tokens_ = {0, length}, layers_ = {0, layers};
    source_blocks_ = random_table(random_, layouts_.first, length);
    destination_blocks_ = random_table(random_, layouts_.second, length);
    initiator_ = choose(random_, {Initiator::source, Initiator::destination});
  }

  void check_all() {
    check(Payload::values);
    if (layouts_.first.spec().scales) check(Payload::scales);
  }

 private:
  PlanRequest request(std::uint32_t source_rank, std::uint32_t destination_rank, Payload payload) const {
    return {{&layouts_.first, source_blocks_, source_rank},
            {&layouts_.second, destination_blocks_, destination_rank},
            tokens_,
            layers_,
            initiator_,
            payload};
  }

  static std::uint64_t region_bytes(const Layout& layout, Payload payload) {
    return payload == Payload::values ? layout.spec().values.region_bytes
                                      : layout.spec().scales->placement.region_bytes;
  }

  /// What the destination's region must hold in the end: one element after the other, straight from
  /// the definition of a layout.
  Bytes copied_naively(const std::vector<Bytes>& sources, Bytes destination, std::uint32_t rank,
                       Payload payload) const {
    const auto& [from, to] = layouts_;
    const HeadRange heads = to.heads_of(rank);
    for (std::uint32_t layer = layers_.first; layer < layers_.end; ++layer)
      for (std::uint32_t part = 0; part < to.parts(); ++part)
        for (std::uint32_t token = tokens_.first; token < tokens_.end; ++token)
          for (std::uint32_t head = heads.first; head < heads.end(); ++head)
            copy_element(sources, destination, rank, payload, {layer, part, token, head});
    return destination;
  }

  struct Element {
    std::uint32_t layer, part, token, head;
  };
  void copy_element(const std::vector<Bytes>& sources, Bytes& destination, std::uint32_t rank, Payload payload,
                    const Element& e) const {
    const auto& [from, to] = layouts_;
    const auto place = [&](const Layout& layout, const std::vector<BlockId>& blocks, std::uint32_t at_rank) {
      const std::uint32_t size = layout.spec().block_tokens;
      const std::uint32_t head = e.head - layout.heads_of(at_rank).first;
      const auto part = static_cast<Part>(e.part);
      return payload == Payload::values
                 ? layout.address(e.layer, part, blocks[e.token / size], e.token % size, head)
                 : layout.scale_address(e.layer, part, blocks[e.token / size], e.token % size, head);
    };
    std::uint32_t holder = 0;
    while (e.head < from.heads_of(holder).first || e.head >= from.heads_of(holder).end()) ++holder;
    const std::uint64_t bytes = payload == Payload::values ? from.head_bytes() : dtype_bytes(from.spec().scales->dtype);
    std::memcpy(destination.data() + place(to, destination_blocks_, rank),
                sources[holder].data() + place(from, source_blocks_, holder), bytes);
  }

  /// The sources' regions. Ranks that are replicas of each other hold the same bytes.
  std::vector<Bytes> make_sources(Payload payload) {
    std::vector<Bytes> sources;
    for (std::uint32_t rank = 0; rank < layouts_.first.spec().tp_size; ++rank) {
      const bool replica = rank % layouts_.first.head_replicas() != 0;
      sources.push_back(replica ? sources.back() : random_bytes(random_, region_bytes(layouts_.first, payload)));
    }
    return sources;
  }

  void check(Payload payload) {
    const std::vector<Bytes> sources = make_sources(payload);
    for (std::uint32_t rank = 0; rank < layouts_.second.spec().tp_size; ++rank) {
      const Bytes empty = random_bytes(random_, region_bytes(layouts_.second, payload));
      Bytes destination = empty;
      std::vector<std::uint8_t> written(destination.size());
      for (std::uint32_t from = 0; from < sources.size(); ++from) {
        const auto plan = make_plan(request(from, rank, payload));
        ASSERT_TRUE(plan) << plan.status().to_string();
        expect_maximal(*plan);
        apply(*plan, sources[from], destination, written);
      }
      ASSERT_EQ(destination, copied_naively(sources, empty, rank, payload));
      ASSERT_EQ(std::ranges::count_if(written, [](auto times) { return times > 1; }), 0) << "a byte is sent twice";
    }
  }

  void apply(const std::vector<Slice>& plan, const Bytes& source, Bytes& destination,
             std::vector<std::uint8_t>& written) const {
    for (const Slice& slice : plan) {
      const bool reads = initiator_ == Initiator::destination;
      const std::uint64_t to = reads ? slice.local_offset : slice.remote_offset;
      const std::uint64_t from = reads ? slice.remote_offset : slice.local_offset;
      ASSERT_TRUE(fits(to, slice.length, destination.size()) && fits(from, slice.length, source.size()));
      std::memcpy(destination.data() + to, source.data() + from, slice.length);
      for (std::uint64_t i = 0; i < slice.length; ++i) ++written[to + i];
    }
  }

  /// In ascending order, and no slice goes on where another one ends on both sides.
  static void expect_maximal(const std::vector<Slice>& plan) {
    EXPECT_TRUE(std::ranges::is_sorted(plan, {}, &Slice::local_offset));
    std::set<std::pair<std::uint64_t, std::uint64_t>> ends;
    for (const Slice& slice : plan) {
      EXPECT_GT(slice.length, 0u);
      ends.emplace(slice.local_offset + slice.length, slice.remote_offset + slice.length);
    }
    for (const Slice& slice : plan) EXPECT_FALSE(ends.contains({slice.local_offset, slice.remote_offset}));
  }

  Random random_;
  std::pair<Layout, Layout> layouts_;
  std::vector<BlockId> source_blocks_;
  std::vector<BlockId> destination_blocks_;
  IndexRange tokens_;
  IndexRange layers_;
  Initiator initiator_ = Initiator::destination;
};

class RandomPlans : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomPlans, CopyWhatANaiveCopyDoes) {
  for (std::uint64_t seed = GetParam(); seed < GetParam() + 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomPlan(seed).check_all();
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPlans, ::testing::Range<std::uint64_t>(0, 1000, 100));

}  // namespace
}  // namespace kvferry
