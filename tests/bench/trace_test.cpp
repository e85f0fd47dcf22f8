// Traces: which lines are read, and which pages of KV cache a request moves.
#include "bench/trace.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "bench/trace_plan.hpp"

namespace kvferry::bench {
namespace {

constexpr const char* good_line = R"({"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]})";

Result<std::vector<TraceRequest>> read(const std::string& text, std::uint64_t most = 0) {
  std::istringstream input(text);
  return read_trace(input, "trace.jsonl", most);
}

TEST(Trace, ReadsEveryField) {
  const auto requests = read(std::string(good_line) + "\n\n" + good_line);
  ASSERT_TRUE(requests.is_ok()) << requests.status().to_string();
  ASSERT_EQ(requests->size(), 2u);
  const TraceRequest& request = requests->front();
  EXPECT_EQ(request.timestamp_ms, 5);
  EXPECT_EQ(request.input_length, 600u);
  EXPECT_EQ(request.output_length, 2u);
  EXPECT_EQ(request.hash_ids, (std::vector<std::uint64_t>{1, 2}));
}

TEST(Trace, StopsAfterTheRequestsAskedFor) {
  const auto requests = read(std::string(good_line) + "\nthis line is not looked at", 1);
  ASSERT_TRUE(requests.is_ok()) << requests.status().to_string();
  EXPECT_EQ(requests->size(), 1u);
}

TEST(Trace, AWrongLineIsAnErrorThatNamesFileAndLine) {
  const std::vector<std::pair<std::string, std::string>> lines = {
      {"{", "not a JSON object"},
      {"[1]", "not a JSON object"},
      {R"({"input_length": 1, "output_length": 1, "hash_ids": [1]})", "timestamp"},
      {R"({"timestamp": "now", "input_length": 1, "output_length": 1, "hash_ids": [1]})", "timestamp"},
      {R"({"timestamp": 5, "output_length": 1, "hash_ids": [1]})", "input_length"},
      {R"({"timestamp": 5, "input_length": -1, "output_length": 1, "hash_ids": [1]})", "input_length"},
      {R"({"timestamp": 5, "input_length": )" + std::string(100000, '[') + std::string(100000, ']') + "}",
       "input_length"},
      {R"({"timestamp": 5, "input_length": 1e30, "output_length": 1, "hash_ids": [1]})", "input_length"},
      {R"({"timestamp": 5, "input_length": 1, "output_length": null, "hash_ids": [1]})", "output_length"},
      {R"({"timestamp": 5, "input_length": 1, "output_length": 1})", "hash_ids"},
      {R"({"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": ["a"]})", "hash_ids"},
      {R"({"timestamp": 5, "input_length": 513, "output_length": 1, "hash_ids": [1]})", "hash_ids has 1 entries"},
      {R"({"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": [1]})", "timestamp 4"},
  };
  for (const auto& [line, reason] : lines) {
    const auto requests = read(std::string(good_line) + "\n" + line + "\n");
    ASSERT_FALSE(requests.is_ok()) << line;
    EXPECT_EQ(requests.status().code(), Errc::malformed);
    EXPECT_NE(requests.status().text().find("trace.jsonl:2"), std::string::npos) << requests.status().text();
    EXPECT_NE(requests.status().text().find(reason), std::string::npos) << requests.status().text();
  }
}

TEST(Trace, AnEmptyOrMissingFileIsAnError) {
  EXPECT_EQ(read("\n").status().code(), Errc::malformed);
  const auto missing = read_trace_file("/nonexistent/trace.jsonl", 0);
  ASSERT_FALSE(missing.is_ok());
  EXPECT_NE(missing.status().text().find("/nonexistent/trace.jsonl"), std::string::npos);
}

TEST(Trace, TheSyntheticTraceIsWhole) {
  const auto requests = read_trace_file(KVFERRY_SYNTHETIC_TRACE, 0);
  ASSERT_TRUE(requests.is_ok()) << requests.status().to_string();
  EXPECT_EQ(requests->size(), 20u);
}

TEST(Trace, ThePublicTraceIsReadWhenItIsThere) {
  const char* named = std::getenv("KVFERRY_TRACE");
  const std::string file = named ? named : KVFERRY_PUBLIC_TRACE;
  if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not there; set KVFERRY_TRACE to try it";
  const auto requests = read_trace_file(file, 0);
  ASSERT_TRUE(requests.is_ok()) << requests.status().to_string();
  EXPECT_GT(requests->size(), 1000u);
}

/// Two planes of small blocks, four pages in a hash block: easy to reckon with.
constexpr KvModel tiny{"tiny", 1, 2, 8, 1, 128};

TraceRequest request_of(std::vector<std::uint64_t> hashes, std::uint64_t tokens) {
  return {0, tokens, 1, std::move(hashes)};
}

std::vector<PageMove> all_moves(const RequestPlan& plan) {
  std::vector<PageMove> moves;
  for (const auto& transfer : plan.transfers) moves.insert(moves.end(), transfer.begin(), transfer.end());
  return moves;
}

TEST(TracePlan, APartlyFilledLastBlockMovesOnlyItsPages) {
  TracePlanner planner({tiny, 100}, {tiny, 100}, 1);
  const RequestPlan plan = planner.plan(request_of({1, 2}, 512 + 129));
  EXPECT_EQ(plan.pages_moved, 4u + 2);
  EXPECT_EQ(plan.pages_skipped, 0u);
}

TEST(TracePlan, BlocksThatTheDecodeSideHoldsAreSkipped) {
  TracePlanner planner({tiny, 100}, {tiny, 100}, 1);
  (void)planner.plan(request_of({1, 2}, 1024));
  const RequestPlan plan = planner.plan(request_of({1, 2, 3}, 1536));
  EXPECT_EQ(plan.pages_moved, 4u);
  EXPECT_EQ(plan.pages_skipped, 8u);
  const RequestPlan again = planner.plan(request_of({1, 2, 3}, 1536));
  EXPECT_TRUE(again.transfers.empty());
}

TEST(TracePlan, TheLeastRecentlyUsedBlockGoesFirst) {
  TracePlanner planner({tiny, 100}, {tiny, 8}, 1);
  (void)planner.plan(request_of({1}, 512));
  (void)planner.plan(request_of({2}, 512));
  (void)planner.plan(request_of({1}, 512));  // 2 is now the older one
  (void)planner.plan(request_of({3}, 512));
  EXPECT_EQ(planner.plan(request_of({1}, 512)).pages_skipped, 4u);
  EXPECT_EQ(planner.plan(request_of({2}, 512)).pages_skipped, 0u);
}

TEST(TracePlan, ARequestLargerThanAPoolBecomesSeveralTransfersWithoutDoublePages) {
  TracePlanner planner({tiny, 9}, {tiny, 10}, 1);
  const RequestPlan plan = planner.plan(request_of({1, 2, 3, 4, 5}, 5 * 512));
  EXPECT_EQ(plan.transfers.size(), 3u);
  EXPECT_EQ(plan.pages_moved, 20u);
  for (const auto& moves : plan.transfers) {
    std::set<std::uint32_t> prefill;
    std::set<std::uint32_t> decode;
    for (const PageMove& move : moves) {
      EXPECT_TRUE(prefill.insert(move.prefill).second);
      EXPECT_TRUE(decode.insert(move.decode).second);
      EXPECT_LT(move.prefill, 9u);
      EXPECT_LT(move.decode, 10u);
    }
  }
}

TEST(TracePlan, SlicesAreOnePerPlaneAndPageAndStayInside) {
  const KvPool prefill{tiny, 12};
  const KvPool decode{tiny, 16};
  TracePlanner planner(prefill, decode, 1);
  const auto moves = all_moves(planner.plan(request_of({1, 2}, 1024)));
  const auto slices = planner.make_slices(moves);
  ASSERT_EQ(slices.size(), moves.size() * 2);
  std::set<std::uint64_t> local;
  for (const Slice& slice : slices) {
    EXPECT_EQ(slice.length, tiny.block_bytes());
    EXPECT_TRUE(local.insert(slice.local_offset).second);
    EXPECT_TRUE(fits(slice.local_offset, slice.length, decode.bytes()));
    EXPECT_TRUE(fits(slice.remote_offset, slice.length, prefill.bytes()));
  }
  EXPECT_EQ(slices.front().local_offset, moves.front().decode * tiny.block_bytes());
  EXPECT_EQ(slices.back().remote_offset, (12 + moves.back().prefill) * tiny.block_bytes());
}

TEST(TracePlan, APromptOf70bAtTp8IsThePublishedNumberOfSlices) {
  const KvModel model = *find_model("llama-3.1-70b-tp8");
  const KvPool pool = KvPool::of(model, 1ull << 30);
  TracePlanner planner(pool, pool, 1);
  std::vector<std::uint64_t> hashes;
  for (std::uint64_t i = 0; i < 16; ++i) hashes.push_back(i);
  const RequestPlan plan = planner.plan(request_of(hashes, 8192));
  ASSERT_EQ(plan.transfers.size(), 1u);
  EXPECT_EQ(planner.make_slices(plan.transfers.front()).size(), 81'920u);
}

}  // namespace
}  // namespace kvferry::bench
