// Where devices and memory are, read from a tree like sysfs, and what follows: nearer devices carry first.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <kvferry/transports/verbs/topology.hpp>

#include "tests/support/core_pair.hpp"
#include "tests/support/fake_sysfs.hpp"

namespace kvferry::test {
namespace {

using verbs::Distance;
using verbs::PciSlot;
using verbs::Topology;

TEST(Topology, ReadsTheSlotOfADevice) {
  FakeSysfs sysfs;
  sysfs.add_rdma_device("mlx5_0", "pci0000:00/0000:00:01.0/0000:17:00.0", 1);
  sysfs.add_software_device("rxe0");
  const Topology topology(sysfs.root());
  const PciSlot slot = topology.slot_of_rdma_device("mlx5_0");
  EXPECT_EQ(slot.address, "0000:17:00.0");
  EXPECT_EQ(slot.numa_node, 1);
  EXPECT_EQ(slot.path, (std::vector<std::string>{"pci0000:00", "0000:00:01.0", "0000:17:00.0"}));
  EXPECT_TRUE(topology.slot_of_rdma_device("rxe0").address.empty());
  EXPECT_EQ(topology.slot_of_rdma_device("none").numa_node, -1);
}

TEST(Topology, FindsGpusAndNoOtherDisplays) {
  FakeSysfs sysfs;
  sysfs.add_pci_device("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "0x030200", "0x10de");
  sysfs.add_pci_device("pci0000:00/0000:00:03.0/0000:05:00.0", 0, "0x030000", "0x1002");
  sysfs.add_pci_device("pci0000:00/0000:00:02.0", 0, "0x030000", "0x1a03");
  sysfs.add_pci_device("pci0000:00/0000:00:04.0", 0, "0x020000", "0x15b3");
  const auto gpus = Topology(sysfs.root()).gpus();
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[0].slot.address, "0000:05:00.0");
  EXPECT_EQ(gpus[0].vendor, "AMD");
  EXPECT_EQ(gpus[1].slot.address, "0000:81:00.0");
  EXPECT_EQ(gpus[1].vendor, "NVIDIA");
}

TEST(Topology, MeasuresPciDistances) {
  const auto slot = [](std::vector<std::string> path, int node) {
    PciSlot made{path.back(), path, node};
    return made;
  };
  const PciSlot nic = slot({"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"}, 0);
  const auto to = [&](std::vector<std::string> path, int node) {
    return verbs::distance_between(nic, slot(std::move(path), node));
  };
  EXPECT_EQ(to({"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:04:00.0"}, 0),
            Distance::one_switch);
  EXPECT_EQ(to({"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0", "0000:05:00.0"}, 0),
            Distance::several_switches);
  EXPECT_EQ(to({"pci0000:00", "0000:00:02.0", "0000:06:00.0"}, 0), Distance::host_bridge);
  EXPECT_EQ(to({"pci0000:40", "0000:40:01.0", "0000:41:00.0"}, 0), Distance::numa_node);
  EXPECT_EQ(to({"pci0000:80", "0000:80:01.0", "0000:81:00.0"}, 1), Distance::another_node);
  EXPECT_EQ(to({"pci0000:80", "0000:80:01.0", "0000:81:00.0"}, -1), Distance::unknown);
}

TEST(Topology, KnowsTheNumaNodes) {
  FakeSysfs sysfs;
  EXPECT_EQ(Topology(sysfs.root()).numa_nodes(), std::vector<int>{0});
  sysfs.write("devices/system/node/online", "0-1,4");
  EXPECT_EQ(Topology(sysfs.root()).numa_nodes(), (std::vector<int>{0, 1, 4}));
}

TEST(Topology, TellsWhereTouchedMemoryIs) {
  std::vector<char> memory(1 << 20, 'x');
  const int node = Topology().node_of_memory(memory.data(), memory.size());
  const auto nodes = Topology().numa_nodes();
  // A container may forbid the question.
  if (node == -1) GTEST_SKIP() << "the kernel does not say where memory is";
  EXPECT_EQ(std::count(nodes.begin(), nodes.end(), node), 1);
}

/// Two devices on two NUMA nodes on both sides; the memory is where the test says.
class NearestFirst : public testing::TestWithParam<int> {
 protected:
  NearestFirst() : nic(CorePair::devices(2)) {
    for (const char side : {'a', 'b'})
      for (int i = 0; i < 2; ++i)
        sysfs.add_rdma_device(fmt::format("{}{}", side, i), fmt::format("pci0000:{}0/0000:{}0:01.{}", i, i, side - 'a'),
                              i);
  }
  std::unique_ptr<CorePair> start(int node_of_memory) {
    const Topology topology(sysfs.root(), [node_of_memory](const void*, std::uint64_t) { return node_of_memory; });
    auto pair = std::make_unique<CorePair>(nic, 2, VerbsConfig{}, topology);
    pair->open_rails();
    pair->add_regions(64 << 20);
    before[0] = nic.requests_of("a0");
    before[1] = nic.requests_of("a1");
    return pair;
  }
  void read(CorePair& pair, std::uint64_t bytes) {
    const Slice slices[] = {{0, 0, bytes}};
    const auto transfer = pair.submit(Op::read, slices);
    for (int i = 0; i < 100'000 && !transfer->done(); ++i) pair.step();
    ASSERT_TRUE(transfer->done());
    EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
  }
  std::uint64_t requests(int device) {
    return nic.requests_of(fmt::format("a{}", device)) - before[static_cast<std::size_t>(device)];
  }

  FakeSysfs sysfs;
  ScriptedNic nic;
  std::array<std::uint64_t, 2> before{};
};

TEST_P(NearestFirst, SmallReadsUseTheDeviceOfTheMemorysNode) {
  const auto pair = start(GetParam());
  for (int i = 0; i < 20; ++i) read(*pair, 4096);
  EXPECT_EQ(requests(GetParam()), 20u);
  EXPECT_EQ(requests(1 - GetParam()), 0u);
}

TEST_P(NearestFirst, LargeReadsUseBoth) {
  const auto pair = start(GetParam());
  read(*pair, 32 << 20);
  EXPECT_GT(requests(0), 0u);
  EXPECT_GT(requests(1), 0u);
}

INSTANTIATE_TEST_SUITE_P(MemoryOn, NearestFirst, testing::Values(0, 1),
                         [](const auto& info) { return "Node" + std::to_string(info.param); });

}  // namespace
}  // namespace kvferry::test
