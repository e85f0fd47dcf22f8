#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/kvcache/block_table.hpp>
#include <kvferry/kvcache/pool.hpp>

#include "bench/random.hpp"

namespace kvferry {
namespace {

using bench::Random;
using Ids = std::vector<BlockId>;

constexpr std::uint32_t block_tokens = 4;

PrefixHash hash(std::uint64_t number) { return {number, ~number}; }

PoolCounts counts(std::uint32_t free, std::uint32_t cached, std::uint32_t used) { return {free, cached, used}; }

void expect_error(const Status& status, Errc code, std::string_view part) {
  EXPECT_TRUE(status == code) << status.to_string();
  EXPECT_NE(status.text().find(part), std::string_view::npos) << status.text() << "\nshould name: " << part;
}

std::vector<TokenId> tokens(std::uint32_t count, TokenId first = 100) {
  std::vector<TokenId> made(count);
  for (TokenId& token : made) token = first++;
  return made;
}

// ---------------------------------------------------------------- prefix hashes

TEST(PrefixHashes, AFullBlockHasOneAndARestHasNone) {
  EXPECT_TRUE(hash_prefix(tokens(3), 4).empty());
  EXPECT_EQ(hash_prefix(tokens(4), 4).size(), 1u);
  EXPECT_EQ(hash_prefix(tokens(11), 4).size(), 2u);
}

TEST(PrefixHashes, DependOnAllTokensBeforeAndOnTheSalt) {
  const auto base = hash_prefix(tokens(8), 4);
  auto other = tokens(8);
  other[0] += 1;
  EXPECT_NE(hash_prefix(other, 4)[1], base[1]) << "the second block is the same, what comes before is not";
  EXPECT_EQ(hash_prefix(tokens(12), 4)[1], base[1]) << "what follows is of no account";
  EXPECT_NE(hash_prefix(tokens(8), 4, "lora-7")[0], base[0]);
  EXPECT_EQ(hash_block(base[0], tokens(4, 104)), base[1]);
}

// Machines exchange these, so they may not change with the library's version.
TEST(PrefixHashes, AreTheSameEverywhere) {
  const PrefixHash known = hash_prefix(std::vector<TokenId>{1, 2, 3, 4}, 4, "salt")[0];
  EXPECT_EQ(known, (PrefixHash{0x1099c3bec8ba83a7, 0xf7b9779f6b03619e})) << "XXH3_128bits of salt hash and tokens";
}

// ---------------------------------------------------------------- the pool

TEST(Pool, AFreshPoolGivesOutNeighbours) {
  BlockPool pool(8, block_tokens);
  EXPECT_EQ(pool.allocate(3).value(), (Ids{0, 1, 2}));
  EXPECT_EQ(pool.counts(), counts(5, 0, 3));
}

TEST(Pool, AllocatingIsAllOrNothing) {
  BlockPool pool(8, block_tokens);
  const Ids ids = pool.allocate(5).value();
  expect_error(pool.allocate(4).status(), Errc::resource_exhausted,
               "4 KV blocks are asked for, but of 8 only 3 are free");
  EXPECT_EQ(pool.counts(), counts(3, 0, 5));
  EXPECT_TRUE(pool.allocate(0).value().empty());
}

TEST(Pool, TheLastReleaseFrees) {
  BlockPool pool(2, block_tokens);
  const Ids ids = pool.allocate(1).value();
  ASSERT_TRUE(pool.reference(ids));
  ASSERT_TRUE(pool.release(ids));
  EXPECT_EQ(pool.counts(), counts(1, 0, 1));
  ASSERT_TRUE(pool.release(ids));
  EXPECT_EQ(pool.counts(), counts(2, 0, 0));
}

TEST(Pool, MisuseIsNamedAndChangesNothing) {
  BlockPool pool(4, block_tokens);
  const Ids ids = pool.allocate(2).value();
  const auto refused = [&](const Status& status, std::string_view part) {
    expect_error(status, Errc::invalid_argument, part);
    EXPECT_EQ(pool.counts(), counts(2, 0, 2));
    EXPECT_EQ(pool.references(0).value(), 1u);
  };
  refused(pool.release(Ids{0, 3}), "block 3 is not in use");
  refused(pool.release(Ids{0, 4}), "block 4 is not of this pool, which has 4 blocks");
  refused(pool.release(Ids{0, 1, 0}), "block 0 is not in use");
  refused(pool.reference(Ids{0, 2}), "block 2 is not in use");
  refused(pool.publish(3, hash(1)).status(), "block 3 is not in use");
  refused(pool.publish(9, hash(1)).status(), "block 9 is not of this pool");
  refused(pool.references(4).status(), "block 4 is not of this pool");
  ASSERT_TRUE(pool.publish(0, hash(1)));
  refused(pool.publish(0, hash(2)).status(), "block 0 is published under another prefix");
}

TEST(Pool, AnIdMayStandTwice) {
  BlockPool pool(1, block_tokens);
  ASSERT_TRUE(pool.allocate(1));
  ASSERT_TRUE(pool.reference(Ids{0, 0}));
  EXPECT_EQ(pool.references(0).value(), 3u);
  ASSERT_TRUE(pool.release(Ids{0, 0, 0}));
  EXPECT_EQ(pool.counts(), counts(1, 0, 0));
}

TEST(Pool, PublishedBlocksStayUntilTheyAreNeeded) {
  BlockPool pool(2, block_tokens);
  const Ids ids = pool.allocate(2).value();
  ASSERT_TRUE(pool.publish(ids[0], hash(7)));
  ASSERT_TRUE(pool.release(ids));
  EXPECT_EQ(pool.counts(), counts(1, 1, 0));
  EXPECT_EQ(pool.share(std::vector{hash(7)}), Ids{ids[0]});
  EXPECT_EQ(pool.counts(), counts(1, 0, 1));
  ASSERT_TRUE(pool.release(Ids{ids[0]}));
  ASSERT_TRUE(pool.allocate(2));
  EXPECT_TRUE(pool.share(std::vector{hash(7)}).empty()) << "the block holds something else now";
}

TEST(Pool, TheLeastRecentlyReleasedGoesFirst) {
  BlockPool pool(3, block_tokens);
  const Ids ids = pool.allocate(3).value();
  for (const BlockId id : ids) ASSERT_TRUE(pool.publish(id, hash(id)));
  ASSERT_TRUE(pool.release(Ids{1, 0, 2}));
  ASSERT_EQ(pool.share(std::vector{hash(1)}), Ids{1});
  ASSERT_TRUE(pool.release(Ids{1}));
  EXPECT_EQ(pool.allocate(2).value(), (Ids{0, 2})) << "1 was used again";
}

TEST(Pool, SharingStopsAtTheFirstGap) {
  BlockPool pool(4, block_tokens);
  const Ids ids = pool.allocate(4).value();
  for (const BlockId id : ids) ASSERT_TRUE(pool.publish(id, hash(id)));
  EXPECT_EQ(pool.share(std::vector{hash(0), hash(1), hash(99), hash(3)}), (Ids{0, 1}));
  EXPECT_EQ(pool.references(0).value(), 2u);
  EXPECT_EQ(pool.references(3).value(), 1u);
}

TEST(Pool, TheFirstToPublishAPrefixIsShared) {
  BlockPool pool(2, block_tokens);
  const Ids ids = pool.allocate(2).value();
  EXPECT_EQ(pool.publish(0, hash(5)).value(), 0u);
  EXPECT_EQ(pool.publish(1, hash(5)).value(), 0u);
  EXPECT_EQ(pool.publish(0, hash(5)).value(), 0u);
  ASSERT_TRUE(pool.release(ids));
  EXPECT_EQ(pool.counts(), counts(1, 1, 0)) << "the second one was never shared";
}

TEST(Pool, ForgettingPrefixesFreesWhatNobodyHolds) {
  BlockPool pool(2, block_tokens);
  const Ids ids = pool.allocate(2).value();
  for (const BlockId id : ids) ASSERT_TRUE(pool.publish(id, hash(id)));
  ASSERT_TRUE(pool.release(Ids{1}));
  pool.forget_prefixes();
  EXPECT_EQ(pool.counts(), counts(1, 0, 1));
  EXPECT_TRUE(pool.share(std::vector{hash(0)}).empty());
  ASSERT_TRUE(pool.release(Ids{0}));
  EXPECT_EQ(pool.counts(), counts(2, 0, 0));
}

TEST(Pool, AnEmptyPoolRefuses) {
  BlockPool pool(0, 0);
  EXPECT_EQ(pool.block_tokens(), 1u);
  expect_error(pool.allocate(1).status(), Errc::resource_exhausted, "of 0 only 0");
}

// ---------------------------------------------------------------- block tables

TEST(BlockTables, TakeWhatTheirTokensNeed) {
  BlockPool pool(4, block_tokens);
  BlockTable table = BlockTable::open(pool, tokens(5)).value();
  EXPECT_EQ(table.blocks().size(), 2u);
  EXPECT_EQ(table.tokens(), 5u);
  ASSERT_TRUE(table.append(tokens(3)));
  EXPECT_EQ(table.blocks().size(), 2u);
  ASSERT_TRUE(table.append(tokens(1)));
  EXPECT_EQ(table.blocks().size(), 3u);
  table.close();
  table.close();
  EXPECT_EQ(pool.counts(), counts(4, 0, 0));
}

TEST(BlockTables, ShareOnlyWhatWasPublished) {
  BlockPool pool(8, block_tokens);
  BlockTable first = BlockTable::open(pool, tokens(10)).value();
  EXPECT_EQ(BlockTable::open(pool, tokens(10)).value().shared_tokens(), 0u) << "nothing is computed yet";
  ASSERT_TRUE(first.publish(7));
  EXPECT_EQ(BlockTable::open(pool, tokens(10)).value().shared_tokens(), 4u) << "the second block is not complete";
  ASSERT_TRUE(first.publish(10));
  const BlockTable second = BlockTable::open(pool, tokens(10)).value();
  EXPECT_EQ(second.shared_tokens(), 8u);
  EXPECT_EQ(Ids(second.blocks().begin(), second.blocks().begin() + 2),
            Ids(first.blocks().begin(), first.blocks().begin() + 2));
  EXPECT_NE(second.blocks()[2], first.blocks()[2]) << "a block that is not full is never shared";
  EXPECT_EQ(BlockTable::open(pool, tokens(10), "tenant").value().shared_tokens(), 0u);
}

TEST(BlockTables, APrefixOutlivesWhatFollowsIt) {
  BlockPool pool(3, block_tokens);
  BlockTable first = BlockTable::open(pool, tokens(12)).value();
  ASSERT_TRUE(first.publish(12));
  first.close();
  EXPECT_EQ(pool.counts(), counts(0, 3, 0));
  const BlockTable other = BlockTable::open(pool, tokens(4, 900)).value();
  EXPECT_EQ(BlockTable::open(pool, tokens(8)).value().shared_tokens(), 8u) << "the last block gave way";
}

TEST(BlockTables, TokensThatComeLaterAreSharedAlike) {
  BlockPool pool(8, block_tokens);
  BlockTable grown = BlockTable::open(pool, tokens(2)).value();
  for (TokenId token = 102; token < 112; ++token) ASSERT_TRUE(grown.append({&token, 1}));
  ASSERT_TRUE(grown.publish(12));
  EXPECT_EQ(BlockTable::open(pool, tokens(12)).value().shared_tokens(), 12u);
}

TEST(BlockTables, FailuresHoldNothing) {
  BlockPool pool(3, block_tokens);
  BlockTable table = BlockTable::open(pool, tokens(8)).value();
  ASSERT_TRUE(table.publish(8));
  expect_error(BlockTable::open(pool, tokens(13)).status(), Errc::resource_exhausted, "13 tokens need 4 KV blocks");
  const BlockTable last = BlockTable::open(pool, tokens(1, 500)).value();
  expect_error(BlockTable::open(pool, tokens(9)).status(), Errc::resource_exhausted, "KV blocks are asked for");
  EXPECT_EQ(pool.references(0).value(), 1u) << "what was shared before the failure is given back";
  expect_error(table.append(tokens(1)), Errc::resource_exhausted, "KV blocks are asked for");
  EXPECT_EQ(table.tokens(), 8u);
  expect_error(table.publish(9), Errc::out_of_bounds, "9 tokens");
}

TEST(BlockTables, MovingLeavesNothingBehind) {
  BlockPool pool(4, block_tokens);
  {
    BlockTable one = BlockTable::open(pool, tokens(8)).value();
    BlockTable two = std::move(one);
    EXPECT_TRUE(one.blocks().empty());  // NOLINT(bugprone-use-after-move)
    one = BlockTable::open(pool, tokens(4)).value();
    one = std::move(two);
    EXPECT_EQ(pool.counts(), counts(2, 0, 2));
  }
  EXPECT_EQ(pool.counts(), counts(4, 0, 0));
}

// ---------------------------------------------------------------- random operations against a model

/// What a pool should do, told as simply as possible.
class PoolModel {
 public:
  explicit PoolModel(std::uint32_t blocks) : references_(blocks) {}

  std::uint32_t size() const { return static_cast<std::uint32_t>(references_.size()); }
  std::uint32_t references(BlockId id) const { return references_[id]; }
  std::uint32_t used() const { return size() - static_cast<std::uint32_t>(std::ranges::count(references_, 0u)); }
  PoolCounts counts() const {
    const auto cached = static_cast<std::uint32_t>(cached_.size());
    return {size() - used() - cached, cached, used()};
  }

  /// The pool chose these; they must be all that is free, and then the oldest cached ones in order.
  void allocate(const Ids& ids) {
    for (const BlockId id : ids) {
      ASSERT_EQ(references_[id], 0u);
      if (counts().free > 0) {
        ASSERT_EQ(std::ranges::count(cached_, id), 0) << "a cached block went while another was free";
      } else {
        ASSERT_EQ(id, cached_.front()) << "not the least recently released";
        cached_.pop_front();
        by_hash_.erase(hash_of_.at(id));
        hash_of_.erase(id);
      }
      references_[id] = 1;
    }
  }

  bool holds(const Ids& ids) const {
    std::map<BlockId, std::uint32_t> asked;
    for (const BlockId id : ids)
      if (id >= size() || ++asked[id] > references_[id]) return false;
    return true;
  }
  bool in_use(const Ids& ids) const {
    return std::ranges::all_of(ids, [&](BlockId id) { return id < size() && references_[id] > 0; });
  }
  void reference(const Ids& ids) {
    for (const BlockId id : ids) ++references_[id];
  }
  void release(const Ids& ids) {
    for (const BlockId id : ids) --references_[id];
    std::set<BlockId> seen;
    for (const BlockId id : ids)
      if (references_[id] == 0 && hash_of_.contains(id) && seen.insert(id).second) cached_.push_back(id);
  }
  BlockId publish(BlockId id, std::uint64_t prefix) {
    if (by_hash_.try_emplace(prefix, id).second) hash_of_[id] = prefix;
    return by_hash_.at(prefix);
  }
  bool published_otherwise(BlockId id, std::uint64_t prefix) const {
    return hash_of_.contains(id) && hash_of_.at(id) != prefix;
  }
  Ids share(const std::vector<std::uint64_t>& prefixes) {
    Ids ids;
    for (const std::uint64_t prefix : prefixes) {
      if (!by_hash_.contains(prefix)) break;
      ids.push_back(by_hash_.at(prefix));
      ++references_[ids.back()];
      cached_.remove(ids.back());
    }
    return ids;
  }
  void forget() {
    cached_.clear();
    by_hash_.clear();
    hash_of_.clear();
  }

 private:
  std::vector<std::uint32_t> references_;
  std::list<BlockId> cached_;
  std::map<std::uint64_t, BlockId> by_hash_;
  std::map<BlockId, std::uint64_t> hash_of_;
};

class RandomOperations {
 public:
  explicit RandomOperations(std::uint64_t seed) : random_(seed) {}

  void run(int operations) {
    for (int i = 0; i < operations && !::testing::Test::HasFailure(); ++i) {
      step();
      ASSERT_EQ(pool_.counts(), model_.counts());
      for (BlockId id = 0; id < pool_.size(); ++id) ASSERT_EQ(pool_.references(id).value(), model_.references(id));
    }
    release_all();
    EXPECT_EQ(pool_.counts().used, 0u);
    EXPECT_EQ(pool_.counts().available(), pool_.size());
  }

 private:
  void step() {
    switch (random_.below(16)) {
      case 0:
        if (random_.below(20) == 0) forget();
        break;
      case 1:
      case 2:
      case 3:
        allocate();
        break;
      case 4:
      case 5:
        reference();
        break;
      case 6:
      case 7:
      case 8:
        publish();
        break;
      case 9:
      case 10:
        share();
        break;
      default:
        release();
    }
  }

  /// Mostly ids that mean something; now and then free, foreign or doubled ones.
  Ids some_ids() {
    Ids ids(random_.below(5));
    for (BlockId& id : ids) id = static_cast<BlockId>(random_.below(pool_.size() + (random_.below(8) == 0 ? 2 : 0)));
    return ids;
  }
  std::uint64_t some_prefix() { return random_.below(20); }

  void allocate() {
    const auto count = static_cast<std::uint32_t>(random_.below(5));
    const auto ids = pool_.allocate(count);
    ASSERT_EQ(ids.is_ok(), count <= model_.counts().available());
    if (!ids) return;
    ASSERT_EQ(ids->size(), count);
    model_.allocate(*ids);
  }
  void reference() {
    const Ids ids = some_ids();
    const Status status = pool_.reference(ids);
    ASSERT_EQ(status.is_ok(), model_.in_use(ids)) << status.to_string();
    if (status) model_.reference(ids);
  }
  void release() {
    const Ids ids = some_ids();
    const Status status = pool_.release(ids);
    ASSERT_EQ(status.is_ok(), model_.holds(ids)) << status.to_string();
    if (status) model_.release(ids);
  }
  void publish() {
    const auto id = static_cast<BlockId>(random_.below(pool_.size() + 1));
    const std::uint64_t prefix = some_prefix();
    const auto shared = pool_.publish(id, hash(prefix));
    ASSERT_EQ(shared.is_ok(), model_.in_use({id}) && !model_.published_otherwise(id, prefix));
    if (!shared) return;
    ASSERT_EQ(*shared, model_.publish(id, prefix));
  }
  void share() {
    std::vector<std::uint64_t> prefixes(random_.below(4));
    std::vector<PrefixHash> hashes;
    for (std::uint64_t& prefix : prefixes) hashes.push_back(hash(prefix = some_prefix()));
    ASSERT_EQ(pool_.share(hashes), model_.share(prefixes));
  }
  void forget() {
    pool_.forget_prefixes();
    model_.forget();
  }
  void release_all() {
    for (BlockId id = 0; id < pool_.size(); ++id)
      for (std::uint32_t left = model_.references(id); left > 0; --left) ASSERT_TRUE(pool_.release(Ids{id}));
  }

  Random random_;
  BlockPool pool_{12, block_tokens};
  PoolModel model_{12};
};

TEST(PoolProperties, DoesWhatASimpleModelDoes) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomOperations(seed).run(400);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(PoolProperties, ManyThreadsLeaveNothingBehind) {
  BlockPool pool(64, block_tokens);
  const auto work = [&](std::uint64_t seed) {
    Random random(seed);
    for (int i = 0; i < 500; ++i) {
      // Few prompts, so that threads meet in the same blocks.
      const auto prompt =
          tokens(1 + static_cast<std::uint32_t>(random.below(40)), static_cast<TokenId>(random.below(3)));
      auto table = BlockTable::open(pool, prompt);
      if (!table) continue;
      EXPECT_TRUE(table->publish(static_cast<std::uint32_t>(random.below(prompt.size() + 1))));
      static_cast<void>(table->append(tokens(static_cast<std::uint32_t>(random.below(6)))));
    }
  };
  std::vector<std::jthread> threads;
  for (std::uint64_t seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  threads.clear();
  EXPECT_EQ(pool.counts().used, 0u);
  EXPECT_EQ(pool.counts().available(), 64u);
}

}  // namespace
}  // namespace kvferry
