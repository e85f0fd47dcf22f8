#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/kvcache/staging.hpp>

#include "tests/kvcache/random_layout.hpp"

namespace kvferry {
namespace {

using Bytes = std::vector<std::uint8_t>;

void expect_error(const Status& status, Errc code, std::string_view part) {
  EXPECT_TRUE(status == code) << status.to_string();
  EXPECT_NE(status.text().find(part), std::string_view::npos) << status.text() << "\nshould name: " << part;
}

TEST(Staging, LongRunsGoDirectly) {
  const std::vector<Slice> plan{{0, 0, 512}, {600, 700, 511}, {2000, 3000, 4096}};
  const StagedPlan staged = stage_plan(plan, Initiator::destination).value();
  EXPECT_EQ(staged.direct, (std::vector<Slice>{plan[0], plan[2]}));
  ASSERT_EQ(staged.rounds.size(), 1u);
  EXPECT_EQ(staged.rounds[0].pack, (std::vector<StagingCopy>{{700, 0, 511}}));
  EXPECT_EQ(staged.rounds[0].unpack, (std::vector<StagingCopy>{{600, 0, 511}}));
  EXPECT_EQ(staged.rounds[0].slice(), (Slice{0, 0, 511}));
  EXPECT_EQ(staged.rounds[0].source_end, 1211u);
  EXPECT_EQ(staged.rounds[0].destination_end, 1111u);
}

TEST(Staging, TheInitiatorsSideIsLocal) {
  const std::vector<Slice> plan{{600, 700, 10}};
  const StagedPlan staged = stage_plan(plan, Initiator::source).value();
  EXPECT_EQ(staged.rounds[0].pack, (std::vector<StagingCopy>{{600, 0, 10}}));
  EXPECT_EQ(staged.rounds[0].unpack, (std::vector<StagingCopy>{{700, 0, 10}}));
}

TEST(Staging, CopiesThatTouchOnOneSideAreJoinedThere) {
  const std::vector<Slice> plan{{0, 100, 10}, {10, 300, 10}, {20, 200, 10}};
  const StagingRound round = stage_plan(plan, Initiator::destination).value().rounds.at(0);
  EXPECT_EQ(round.unpack, (std::vector<StagingCopy>{{0, 0, 30}}));
  EXPECT_EQ(round.pack, (std::vector<StagingCopy>{{100, 0, 10}, {300, 10, 10}, {200, 20, 10}}));
}

TEST(Staging, AFullBufferBeginsTheNextRound) {
  const std::vector<Slice> plan(5, Slice{0, 0, 40});
  const StagedPlan staged = stage_plan(plan, Initiator::source, {.threshold = 64, .buffer_bytes = 100}).value();
  std::vector<std::uint64_t> bytes;
  for (const StagingRound& round : staged.rounds) bytes.push_back(round.bytes);
  EXPECT_EQ(bytes, (std::vector<std::uint64_t>{80, 80, 40}));
}

TEST(Staging, AThresholdOfZeroPacksNothing) {
  const std::vector<Slice> plan{{0, 0, 1}};
  EXPECT_TRUE(stage_plan(plan, Initiator::source, {.threshold = 0, .buffer_bytes = 0}).value().rounds.empty());
}

TEST(Staging, EmptySlicesNeedNoRound) {
  const std::vector<Slice> plan{{5, 7, 0}};
  const StagedPlan staged = stage_plan(plan, Initiator::source).value();
  EXPECT_TRUE(staged.rounds.empty());
  EXPECT_TRUE(staged.direct.empty());
}

TEST(StagingRefusals, BadInputIsNamed) {
  expect_error(stage_plan({}, Initiator::source, {.threshold = 512, .buffer_bytes = 511}).status(),
               Errc::invalid_argument, "a buffer of 511 bytes is smaller than the threshold of 512");
  const std::vector<Slice> wrapping{{~std::uint64_t{0}, 0, 2}};
  expect_error(stage_plan(wrapping, Initiator::source).status(), Errc::out_of_bounds, "beyond 64 bits");
}

TEST(StagingRefusals, ASmallRegionOrBufferMovesNothing) {
  const std::vector<Slice> plan{{0, 50, 10}, {20, 30, 10}};
  const StagingRound round = stage_plan(plan, Initiator::destination).value().rounds.at(0);
  std::vector<std::byte> source(60, std::byte{1}), staging(20), destination(30);
  const auto untouched = [](const auto& bytes) { return std::ranges::count(bytes, std::byte{0}) == std::ssize(bytes); };

  expect_error(pack(round, std::span(source).first(59), staging), Errc::out_of_bounds,
               "pack: the source region has 59 bytes, but the round needs 60");
  expect_error(pack(round, source, std::span(staging).first(19)), Errc::out_of_bounds,
               "pack: the staging buffer has 19 bytes");
  EXPECT_TRUE(untouched(staging));
  ASSERT_TRUE(pack(round, source, staging));
  expect_error(unpack(round, staging, std::span(destination).first(29)), Errc::out_of_bounds,
               "unpack: the destination region has 29 bytes");
  expect_error(unpack(round, std::span(staging).first(19), destination), Errc::out_of_bounds,
               "unpack: the staging buffer has 19 bytes");
  EXPECT_TRUE(untouched(destination));
  EXPECT_TRUE(unpack(round, staging, destination));
}

// ---------------------------------------------------------------- properties, on random plans

/// Copies by the slices themselves.
void copy_directly(const std::vector<Slice>& slices, Initiator initiator, const Bytes& source, Bytes& destination) {
  const bool reads = initiator == Initiator::destination;
  for (const Slice& slice : slices)
    std::memcpy(destination.data() + (reads ? slice.local_offset : slice.remote_offset),
                source.data() + (reads ? slice.remote_offset : slice.local_offset), slice.length);
}

/// Copies through two staging buffers of exactly the size that was promised.
void copy_staged(const StagedPlan& staged, const StagingOptions& options, const Bytes& source, Bytes& destination) {
  Bytes sent(options.buffer_bytes), arrived(options.buffer_bytes);
  for (const StagingRound& round : staged.rounds) {
    ASSERT_GT(round.bytes, 0u);
    ASSERT_TRUE(pack(round, std::as_bytes(std::span(source)), std::as_writable_bytes(std::span(sent))));
    const Slice slice = round.slice();
    std::copy_n(sent.begin() + static_cast<std::ptrdiff_t>(slice.local_offset), slice.length,
                arrived.begin() + static_cast<std::ptrdiff_t>(slice.remote_offset));
    ASSERT_TRUE(unpack(round, std::as_bytes(std::span(arrived)), std::as_writable_bytes(std::span(destination))));
  }
}

void check_round_trip(std::uint64_t seed) {
  Random random(seed);
  const auto [from, to] = random_pair(random);
  const std::uint32_t tokens = pick(random, 1, 24);
  const auto source_blocks = random_table(random, from, tokens);
  const auto destination_blocks = random_table(random, to, tokens);
  const Initiator initiator = choose(random, {Initiator::source, Initiator::destination});
  const auto plan = make_plan(
      {{&from, source_blocks, 0}, {&to, destination_blocks, 0}, {0, tokens}, {0, from.spec().layers}, initiator});
  ASSERT_TRUE(plan) << plan.status().to_string();
  StagingOptions options;
  options.threshold = random.below(64);
  options.buffer_bytes = options.threshold + random.below(200);

  const StagedPlan staged = stage_plan(*plan, initiator, options).value();
  const Bytes source = random_bytes(random, from.spec().values.region_bytes);
  const Bytes before = random_bytes(random, to.spec().values.region_bytes);
  Bytes expected = before, got = before;
  copy_directly(*plan, initiator, source, expected);
  copy_directly(staged.direct, initiator, source, got);
  copy_staged(staged, options, source, got);
  EXPECT_EQ(got, expected);
}

TEST(Staging, CarriesTheSameBytesAsThePlan) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_round_trip(seed);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace kvferry
