#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/runtime/region_table.hpp>

namespace kvferry {
namespace {

class RegionTables : public ::testing::Test {
 protected:
  std::unique_ptr<RegionRecord> record(std::string name, std::uint64_t offset, std::uint64_t size,
                                       MemoryKind kind = MemoryKind::host) {
    auto made = std::make_unique<RegionRecord>();
    made->name = std::move(name);
    made->data = memory_.data() + offset;
    made->size = size;
    made->kind = kind;
    return made;
  }
  RegionKey add(std::string name, std::uint64_t offset, std::uint64_t size) {
    return table_.add(record(std::move(name), offset, size)).value()->key;
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(1 << 20);
  RegionTable table_;
};

bool has(const Status& status, std::string_view part) { return status.text().find(part) != std::string_view::npos; }

TEST_F(RegionTables, FindsWhatWasAdded) {
  const auto added = table_.add(record("kv", 0, 100)).value();
  EXPECT_EQ(table_.find(added->key), added.get());
  EXPECT_EQ(table_.find_name("kv"), added);
  EXPECT_EQ(table_.find_name("other"), nullptr);
  EXPECT_EQ(table_.all(), std::vector{added});
}

TEST_F(RegionTables, RefusesANameInUse) {
  add("kv", 0, 100);
  const Status status = table_.add(record("kv", 4096, 100)).status();
  EXPECT_EQ(status.code(), Errc::already_exists);
  EXPECT_TRUE(has(status, "'kv'")) << status.text();
}

TEST_F(RegionTables, RefusesOverlapAndNamesBothSides) {
  add("kv", 1000, 1000);
  for (const auto& [offset, size] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {1000, 1000}, {900, 101}, {1999, 1}, {1500, 10}, {0, 5000}, {1999, 5000}}) {
    const Status status = table_.add(record("second", offset, size)).status();
    EXPECT_EQ(status.code(), Errc::already_exists) << offset << "+" << size;
    EXPECT_TRUE(has(status, "'kv' [0x") && has(status, "'second' [0x")) << status.text();
  }
}

TEST_F(RegionTables, TakesNeighboursThatTouch) {
  add("kv", 1000, 1000);
  add("before", 0, 1000);
  add("after", 2000, 1000);
  EXPECT_EQ(table_.all().size(), 3u);
}

TEST_F(RegionTables, MemoryKindsDoNotOverlapEachOther) {
  add("host", 0, 1000);
  EXPECT_TRUE(table_.add(record("gpu", 0, 1000, MemoryKind::cuda)));
  EXPECT_EQ(table_.add(record("gpu2", 999, 1, MemoryKind::cuda)).status().code(), Errc::already_exists);
}

TEST_F(RegionTables, RefusesEmptyAndImpossibleRegions) {
  EXPECT_EQ(table_.add(record("kv", 0, 0)).status().code(), Errc::invalid_argument);
  EXPECT_EQ(table_.add(record("", 0, 10)).status().code(), Errc::invalid_argument);
  EXPECT_EQ(table_.add(record(std::string(256, 'n'), 0, 10)).status().code(), Errc::invalid_argument);
  EXPECT_EQ(table_.add(record("kv", 0, ~std::uint64_t{0})).status().code(), Errc::invalid_argument);
  EXPECT_EQ(table_.add(nullptr).status().code(), Errc::invalid_argument);
  auto nowhere = record("kv", 0, 10);
  nowhere->data = nullptr;
  EXPECT_EQ(table_.add(std::move(nowhere)).status().code(), Errc::invalid_argument);
}

TEST_F(RegionTables, RetiredRegionsAreHiddenButKept) {
  const auto added = table_.add(record("kv", 0, 100)).value();
  const std::uint64_t version = table_.version();
  EXPECT_TRUE(table_.retire(added->key));
  EXPECT_GT(table_.version(), version);
  EXPECT_EQ(table_.find(added->key), nullptr);
  EXPECT_EQ(table_.find_name("kv"), nullptr);
  EXPECT_TRUE(table_.all().empty());
  EXPECT_EQ(table_.add(record("kv", 4096, 1)).status().code(), Errc::already_exists);
  EXPECT_EQ(table_.add(record("new", 50, 1)).status().code(), Errc::already_exists);
  EXPECT_EQ(table_.retire(added->key).code(), Errc::unknown_region);
}

TEST_F(RegionTables, ErasedRegionsLeaveTheirPlace) {
  std::weak_ptr<const RegionRecord> watched;
  RegionKey key;
  {
    const auto added = table_.add(record("kv", 0, 100)).value();
    watched = added;
    key = added->key;
  }
  EXPECT_TRUE(table_.retire(key));
  EXPECT_FALSE(watched.expired());
  table_.erase(key);
  EXPECT_TRUE(watched.expired());
  EXPECT_TRUE(table_.add(record("kv", 0, 100)));
}

TEST_F(RegionTables, ErasingALivingRegionDoesNothing) {
  const RegionKey key = add("kv", 0, 100);
  table_.erase(key);
  EXPECT_NE(table_.find(key), nullptr);
}

TEST_F(RegionTables, StaleKeysFitNoLaterRegion) {
  const RegionKey old_key = add("kv", 0, 100);
  ASSERT_TRUE(table_.retire(old_key));
  table_.erase(old_key);
  const RegionKey new_key = add("kv", 0, 100);
  EXPECT_EQ(new_key.slot, old_key.slot);
  EXPECT_NE(new_key.generation, old_key.generation);
  EXPECT_EQ(table_.find(old_key), nullptr);
  EXPECT_EQ(table_.retire(old_key).code(), Errc::unknown_region);
  EXPECT_NE(table_.find(new_key), nullptr);
}

TEST_F(RegionTables, ForeignKeysAreUnknown) {
  add("kv", 0, 100);
  EXPECT_EQ(table_.find({}), nullptr);
  EXPECT_EQ(table_.find({RegionTable::max_regions, 1}), nullptr);
  EXPECT_EQ(table_.find({~0u, ~0u}), nullptr);
  EXPECT_EQ(table_.retire({~0u, ~0u}).code(), Errc::unknown_region);
  table_.erase({~0u, ~0u});
}

TEST_F(RegionTables, AnotherLifeGivesOtherKeys) {
  // Two of three random 32-bit starts being equal would take a broken random source.
  RegionTable second;
  RegionTable third;
  const RegionKey a = add("kv", 0, 100);
  const RegionKey b = second.add(record("kv", 0, 100)).value()->key;
  const RegionKey c = third.add(record("kv", 0, 100)).value()->key;
  EXPECT_FALSE(a == b && b == c);
}

TEST_F(RegionTables, HoldsItsLimitAndNoMore) {
  for (std::uint32_t i = 0; i < RegionTable::max_regions; ++i) add("r" + std::to_string(i), i, 1);
  const Status status = table_.add(record("one too many", RegionTable::max_regions, 1)).status();
  EXPECT_EQ(status.code(), Errc::resource_exhausted);
  EXPECT_TRUE(has(status, std::to_string(RegionTable::max_regions))) << status.text();
}

TEST_F(RegionTables, ReadersNeverSeeAForeignRegion) {
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> latest{0};
  std::thread reader([&] {
    while (!stop.load()) {
      const std::uint64_t packed = latest.load(std::memory_order_acquire);
      const RegionKey key{static_cast<std::uint32_t>(packed >> 32), static_cast<std::uint32_t>(packed)};
      const RegionRecord* found = table_.find(key);
      EXPECT_TRUE(found == nullptr || found->key == key);
    }
  });
  // The reader may still hold a record when it is retired: they are erased when it has ended.
  std::vector<RegionKey> retired;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const RegionKey key = add("kv" + std::to_string(i), i, 1);
    latest.store(std::uint64_t{key.slot} << 32 | key.generation, std::memory_order_release);
    ASSERT_TRUE(table_.retire(key));
    retired.push_back(key);
  }
  stop = true;
  reader.join();
  for (const RegionKey key : retired) table_.erase(key);
  EXPECT_TRUE(table_.all().empty());
}

}  // namespace
}  // namespace kvferry
