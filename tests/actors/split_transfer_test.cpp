#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/split_transfer.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

std::uint64_t total(const std::vector<Slice>& slices) {
  std::uint64_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.length;
  return bytes;
}

// The run, slice for slice, must be the whole's bytes in order: joined again, it is the whole.
std::vector<Slice> joined(const std::vector<std::vector<Slice>>& runs) {
  std::vector<Slice> all;
  for (const auto& run : runs) {
    for (const Slice& slice : run) {
      Slice* last = all.empty() ? nullptr : &all.back();
      if (last && last->local_offset + last->length == slice.local_offset &&
          last->remote_offset + last->length == slice.remote_offset)
        last->length += slice.length;
      else
        all.push_back(slice);
    }
  }
  return all;
}

TEST(SplitCut, CoversEveryByteOnceInOrder) {
  std::mt19937_64 random(20240229);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t count = 1 + random() % 16;
    std::vector<Slice> slices;
    std::uint64_t local = 0;
    std::uint64_t remote = 1 << 20;
    for (std::size_t i = 0, n = random() % 40; i < n; ++i) {
      const std::uint64_t length = random() % 8 == 0 ? 0 : 1 + random() % (random() % 4 == 0 ? 1'000'000 : 100);
      // Gaps on one side at least, so that neighbours never join and a piece is known by its place.
      local += 1 + random() % 10;
      slices.push_back({local, remote, length});
      local += length;
      remote += length;
    }
    const std::uint64_t bytes = total(slices);
    const auto runs = SplitOwner::cut(slices, count);
    ASSERT_GE(runs.size(), 1u);
    ASSERT_LE(runs.size(), count) << "one run per group at most";
    const std::uint64_t share = (bytes + count - 1) / count;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      ASSERT_LE(total(runs[i]), share);
      ASSERT_TRUE(i + 1 == runs.size() || total(runs[i]) == share) << "all but the last are full";
      for (const Slice& slice : runs[i]) ASSERT_GT(slice.length, 0u);
    }
    std::erase_if(slices, [](const Slice& slice) { return slice.length == 0; });
    ASSERT_EQ(joined(runs), slices);
  }
}

TEST(SplitCut, KnowsTheEdges) {
  EXPECT_EQ(SplitOwner::cut({}, 4), std::vector<std::vector<Slice>>(1));
  const std::vector<Slice> one_byte{{5, 6, 1}};
  EXPECT_EQ(SplitOwner::cut(one_byte, 4), std::vector<std::vector<Slice>>{one_byte});
  const std::vector<Slice> huge{{0, 0, std::uint64_t{1} << 40}};
  const auto runs = SplitOwner::cut(huge, 3);
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(joined(runs), huge);
  EXPECT_EQ(runs[1].front().local_offset, runs[0].front().length);
}

// ---------------------------------------------------------------- parts and the whole

class CancelLog final : public TransferOwner {
 public:
  void cancel(TransferState& transfer) override { cancelled.push_back(&transfer); }
  void offload(std::function<void()> task) override {
    ++offloads;
    task();
  }
  std::vector<TransferState*> cancelled;
  int offloads = 0;
};

struct Split {
  explicit Split(std::size_t count) {
    whole = TransferState::create({.deadline = Clock::now() + 30s, .owner = owner});
    whole->on_complete([this](const Status&) { ++ends; }, Dispatch::in_place);
    for (std::size_t i = 0; i < count; ++i) {
      parts.push_back(TransferState::create({.deadline = Clock::now() + 30s, .owner = owner->base()}));
      owner->add(parts.back());
    }
    SplitOwner::watch(owner, whole);
  }

  std::shared_ptr<CancelLog> base = std::make_shared<CancelLog>();
  std::shared_ptr<SplitOwner> owner = std::make_shared<SplitOwner>(base);
  RefPtr<TransferState> whole;
  std::vector<RefPtr<TransferState>> parts;
  int ends = 0;
};

TEST(SplitOwner, EndsTheWholeWithItsLastPart) {
  Split split(3);
  split.parts[1]->complete({});
  split.parts[2]->complete({});
  EXPECT_FALSE(split.whole->done());
  split.parts[0]->complete({});
  ASSERT_TRUE(split.whole->done());
  EXPECT_TRUE(split.whole->status().is_ok());
  EXPECT_EQ(split.ends, 1);
  EXPECT_TRUE(split.base->cancelled.empty());
}

TEST(SplitOwner, TheFirstErrorCancelsTheOthersAndIsTheOutcome) {
  Split split(3);
  split.parts[1]->complete({Errc::out_of_bounds, "slice 7"});
  EXPECT_EQ(split.base->cancelled, (std::vector{split.parts[0].get(), split.parts[2].get()}));
  EXPECT_FALSE(split.whole->done()) << "the others may still move bytes";
  split.parts[0]->complete({Errc::cancelled, "by the split"});
  EXPECT_FALSE(split.whole->done());
  split.parts[2]->complete({});
  ASSERT_TRUE(split.whole->done());
  EXPECT_TRUE(split.whole->status() == Errc::out_of_bounds) << split.whole->status().to_string();
  EXPECT_EQ(split.whole->status().text(), "slice 7");
  EXPECT_EQ(split.ends, 1);
}

TEST(SplitOwner, CancellingTheWholeCancelsEveryRunningPart) {
  Split split(3);
  split.parts[0]->complete({});
  split.whole->cancel();
  EXPECT_TRUE(split.owner->cancelled());
  EXPECT_EQ(split.base->cancelled, (std::vector{split.parts[1].get(), split.parts[2].get()}));
  split.parts[1]->complete({Errc::cancelled, "part 1"});
  split.parts[2]->complete({Errc::cancelled, "part 2"});
  ASSERT_TRUE(split.whole->done());
  EXPECT_TRUE(split.whole->status() == Errc::cancelled);
  EXPECT_EQ(split.whole->status().text(), "part 1");
}

TEST(SplitOwner, LetsGoOfEverythingAtTheEnd) {
  std::weak_ptr<SplitOwner> owner;
  std::weak_ptr<CancelLog> base;
  {
    Split split(2);
    owner = split.owner;
    base = split.base;
    for (const auto& part : split.parts) part->complete({});
  }
  EXPECT_TRUE(owner.expired());
  EXPECT_TRUE(base.expired());
}

TEST(SplitOwner, PartsMayEndOnManyThreads) {
  for (int round = 0; round < 200; ++round) {
    Split split(4);
    std::vector<std::thread> pollers;
    for (std::size_t i = 0; i < 4; ++i)
      pollers.emplace_back([&, i] { split.parts[i]->complete(i == 3 ? Status(Errc::peer_lost, "gone") : Status()); });
    for (auto& poller : pollers) poller.join();
    ASSERT_TRUE(split.whole->done());
    EXPECT_TRUE(split.whole->status() == Errc::peer_lost);
    EXPECT_EQ(split.ends, 1);
  }
}

}  // namespace
}  // namespace kvferry
