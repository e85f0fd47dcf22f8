// One transfer with as many slices as a long sequence has blocks.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "tests/e2e/engines.hpp"
#include "tests/support/process.hpp"

namespace kvferry::test {
namespace {

constexpr std::size_t slice_count = 112'000;
constexpr std::uint64_t slice_bytes = 4 * kib;
constexpr std::uint64_t total = slice_count * slice_bytes;
// Both regions are gone through several times: what counts is the number of slices.
constexpr std::size_t places = 16384;
constexpr std::uint64_t region_bytes = places * slice_bytes;

/// Place i of the local region from place `order[i]` of the remote one, again and again.
std::vector<Slice> cycle(std::span<const Slice> order) {
  std::vector<Slice> slices(slice_count);
  for (std::size_t i = 0; i < slice_count; ++i) slices[i] = order[i % order.size()];
  return slices;
}

/// The most anonymous memory that this process has while it watches, beyond what it had before.
class MemoryPeak {
 public:
  MemoryPeak() : before_(own_status_value("RssAnon")), peak_(before_) {
    watcher_ = std::thread([this] {
      while (!stop_) {
        peak_ = std::max(peak_.load(), own_status_value("RssAnon"));
        std::this_thread::sleep_for(1ms);
      }
    });
  }
  ~MemoryPeak() {
    if (watcher_.joinable()) stop();
  }
  MemoryPeak(const MemoryPeak&) = delete;
  MemoryPeak& operator=(const MemoryPeak&) = delete;

  std::uint64_t stop() {
    stop_ = true;
    watcher_.join();
    return static_cast<std::uint64_t>(peak_ - before_) * kib;
  }

 private:
  const long before_;
  std::atomic<long> peak_;
  std::atomic<bool> stop_{false};
  std::thread watcher_;
};

class LargeTest : public ::testing::TestWithParam<const char*> {
 protected:
  LargeTest() { fill(theirs_.bytes(), 1); }

  Transfer begin(std::span<const Slice> slices) { return pair_.initiator.read(pair_.peer, ours_, remote_, slices); }

  /// The whole way, in little memory.
  void read(std::span<const Slice> slices) {
    std::memset(ours_.data(), 0, region_bytes);
    MemoryPeak peak;
    const Transfer transfer = begin(slices);
    EXPECT_TRUE(transfer.wait()) << transfer.status().to_string();
    const std::uint64_t extra = peak.stop();
    // Sanitizers keep what is freed, and shadows of all that is touched.
    if (!sanitized) {
      EXPECT_LT(extra, 16 * mib);
    }
    EXPECT_EQ(transfer.bytes(), total);
  }

  /// The shortest of some tries: what a busy machine takes from the caller is not the engine's.
  Duration time_to_submit(std::span<const Slice> slices) {
    Duration shortest = Duration::max();
    for (int i = 0; i < 5; ++i) {
      const TimePoint start = Clock::now();
      const Transfer transfer = begin(slices);
      shortest = std::min(shortest, Clock::now() - start);
      transfer.cancel();
      EXPECT_TRUE(transfer.wait_for(slow(5s)));
    }
    return shortest;
  }

  Pair pair_{GetParam()};
  Region theirs_ = pair_.target.allocate("kv", region_bytes).value();
  Region ours_ = pair_.initiator.allocate("local", region_bytes).value();
  RemoteHandle remote_ = pair_.initiator.find_region(pair_.peer, "kv").value();
};

INSTANTIATE_TEST_SUITE_P(, LargeTest, each_transport(), transport_name);

TEST_P(LargeTest, MovesALongSequencesBlocksInOneTransfer) {
  const auto order = shuffled_slices(places, slice_bytes, 11);
  const auto scattered = cycle(order);
  read(scattered);
  std::size_t wrong = 0;
  for (const Slice& slice : order)
    wrong += std::memcmp(ours_.data() + slice.local_offset, theirs_.data() + slice.remote_offset, slice_bytes) != 0;
  EXPECT_EQ(wrong, 0u);
  EXPECT_LT(time_to_submit(scattered), slow(20ms));

  // Neighbours merge: as many items as all these bytes need, not one for every so many slices.
  std::vector<Slice> neighbours(places);
  for (std::size_t i = 0; i < places; ++i) neighbours[i] = {i * slice_bytes, i * slice_bytes, slice_bytes};
  const auto contiguous = cycle(neighbours);
  const std::uint64_t before = counter(pair_.initiator, "items_posted");
  read(contiguous);
  EXPECT_EQ(std::memcmp(ours_.data(), theirs_.data(), region_bytes), 0);
  const std::uint64_t chunk = std::string(GetParam()) == "tcp" ? TcpConfig().chunk_bytes : ShmConfig().chunk_bytes;
  EXPECT_EQ(counter(pair_.initiator, "items_posted") - before, (total + chunk - 1) / chunk);
  EXPECT_LT(time_to_submit(contiguous), slow(20ms));
}

}  // namespace
}  // namespace kvferry::test
