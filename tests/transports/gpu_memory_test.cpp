// Registering GPU memory with RDMA devices: by its dma-buf handle, else plainly, else with an error that helps. The GPU
// is a part of this process's memory that the simulated devices refuse to take for a host's.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/core_pair.hpp"

namespace kvferry::test {
namespace {

constexpr std::size_t gpu_bytes = 1 << 20;

class GpuMemory : public testing::Test {
 protected:
  void start(bool dmabuf, bool peermem, std::uint64_t max_mr_bytes = ~std::uint64_t{0}) {
    auto devices = CorePair::devices(1);
    for (NicDevice& device : devices) {
      device.dmabuf = dmabuf;
      device.peermem = peermem;
      device.max_mr_bytes = max_mr_bytes;
    }
    nic = std::make_unique<ScriptedNic>(std::move(devices));
    handle = nic->add_gpu_memory(gpu.data(), gpu.size());
    pair = std::make_unique<CorePair>(*nic, 1);
    pair->open_rails();
  }
  /// A region of the GPU's memory from `offset` on.
  std::unique_ptr<RegionRecord> region(std::size_t offset, bool with_handle) {
    auto record = std::make_unique<RegionRecord>();
    record->name = "gpu";
    record->kind = MemoryKind::cuda;
    record->data = gpu.data() + offset;
    record->size = gpu.size() - offset;
    if (with_handle) record->dmabuf_fd = handle;
    record->dmabuf_offset = offset;
    return record;
  }
  /// Reads host memory of the target into the GPU's.
  void expect_reads_arrive(std::size_t offset) {
    std::ranges::fill(gpu, std::byte{0});
    pair->use_regions(pair->initiator.add_region(region(offset, true)), pair->target.add_region("served", gpu_bytes));
    std::fill_n(pair->served->data, gpu_bytes, std::byte{9});
    const Slice slices[] = {{0, 0, gpu_bytes - offset}};
    const auto transfer = pair->submit(Op::read, slices);
    for (int i = 0; i < 100'000 && !transfer->done(); ++i) pair->step();
    ASSERT_TRUE(transfer->done());
    EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
    EXPECT_EQ(std::ranges::count(gpu, std::byte{9}), static_cast<std::ptrdiff_t>(gpu_bytes - offset));
  }
  Status refusal(bool with_handle) {
    const auto record = region(0, with_handle);
    return pair->initiator.transport->register_region(*record).status();
  }

  std::vector<std::byte> gpu = std::vector<std::byte>(gpu_bytes);
  std::unique_ptr<ScriptedNic> nic;
  std::unique_ptr<CorePair> pair;
  int handle = -1;
};

TEST_F(GpuMemory, IsRegisteredByItsDmaBufHandle) {
  start(true, false);
  expect_reads_arrive(0);
}

TEST_F(GpuMemory, MayBeginInsideTheHandlesMemory) {
  start(true, false);
  expect_reads_arrive(8192);
}

TEST_F(GpuMemory, IsCutIntoPartsThatKeepTheirPlacesInTheHandle) {
  // The pools of a port must still fit into one registration each.
  start(true, false, 5 << 20);
  gpu = std::vector<std::byte>(gpu_bytes);
  std::vector<std::byte> large(12 << 20);
  const int large_handle = nic->add_gpu_memory(large.data(), large.size());
  auto record = std::make_unique<RegionRecord>();
  record->name = "large";
  record->kind = MemoryKind::cuda;
  record->data = large.data();
  record->size = large.size();
  record->dmabuf_fd = large_handle;
  pair->use_regions(pair->initiator.add_region(std::move(record)), pair->target.add_region("served", large.size()));
  std::fill_n(pair->served->data, large.size(), std::byte{7});
  const Slice slices[] = {{0, 0, large.size()}};
  const auto transfer = pair->submit(Op::read, slices);
  for (int i = 0; i < 100'000 && !transfer->done(); ++i) pair->step();
  ASSERT_TRUE(transfer->done());
  EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
  EXPECT_EQ(std::ranges::count(large, std::byte{7}), static_cast<std::ptrdiff_t>(large.size()));
  pair.reset();
}

TEST_F(GpuMemory, IsRegisteredPlainlyWhereTheKernelKnowsIt) {
  start(false, true);
  expect_reads_arrive(0);
}

TEST_F(GpuMemory, WithoutEitherWayIsAnErrorThatNamesBoth) {
  start(false, false);
  const Status status = refusal(true);
  EXPECT_EQ(status, Errc::unsupported);
  EXPECT_NE(status.text().find("dma-buf handle: Operation not supported"), std::string_view::npos) << status.text();
  EXPECT_NE(status.text().find("nvidia-peermem"), std::string_view::npos) << status.text();
}

TEST_F(GpuMemory, WithoutAHandleIsAnErrorThatSaysSo) {
  start(true, false);
  const Status status = refusal(false);
  EXPECT_EQ(status, Errc::unsupported);
  EXPECT_NE(status.text().find("no dma-buf handle was given"), std::string_view::npos) << status.text();
}

}  // namespace
}  // namespace kvferry::test
