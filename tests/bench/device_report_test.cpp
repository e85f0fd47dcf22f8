// What kvferry-info says of simulated devices in a host made for the test.
#include "bench/device_report.hpp"

#include <cstring>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/fake_sysfs.hpp"
#include "tests/support/scripted_nic.hpp"

namespace kvferry::bench {
namespace {

using test::FakeSysfs;
using test::NicDevice;
using test::ScriptedNic;

/// Two devices on two NUMA nodes, each beside a GPU; the second's port is down when told so.
class DeviceReport : public testing::Test {
 protected:
  DeviceReport() {
    sysfs.write("devices/system/node/online", "0-1");
    sysfs.add_rdma_device("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    sysfs.add_rdma_device("mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    sysfs.add_pci_device("pci0000:00/0000:00:01.0/0000:02:00.0", 0, "0x030200", "0x10de");
    sysfs.add_pci_device("pci0000:80/0000:80:01.0/0000:82:00.0", 1, "0x030200", "0x10de");
  }
  static NicDevice device(std::string name, ibv_port_state state = IBV_PORT_ACTIVE) {
    NicDevice made{.name = std::move(name)};
    made.ports[0].state = state;
    made.ports[0].gids = {nobodys_gid(), test::loopback_gid(3)};
    return made;
  }
  /// An address that no interface here has.
  static ibv_gid_entry nobodys_gid() {
    ibv_gid_entry entry = test::loopback_gid(0);
    const std::uint8_t raw[16] = {0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9};
    std::memcpy(entry.gid.raw, raw, sizeof raw);
    return entry;
  }
  Result<nlohmann::ordered_json> describe(std::vector<NicDevice> devices, const VerbsConfig& config = {}) {
    ScriptedNic nic(std::move(devices));
    return describe_devices(nic, verbs::Topology(sysfs.root()), config);
  }

  FakeSysfs sysfs;
};

TEST_F(DeviceReport, SaysWhatEachPortIs) {
  const auto report = describe({device("mlx5_0"), device("mlx5_1", IBV_PORT_DOWN)});
  ASSERT_TRUE(report) << report.status().to_string();
  const auto& first = (*report)["ports"][0];
  EXPECT_EQ(first["name"], "mlx5_0:1");
  EXPECT_EQ(first["used"], true);
  EXPECT_EQ(first["gbit"], 400);
  EXPECT_EQ(first["mtu"], 4096);
  EXPECT_EQ(first["link_layer"], "Ethernet");
  EXPECT_EQ(first["pci"], "0000:01:00.0");
  EXPECT_EQ(first["numa_node"], 0);
  EXPECT_EQ(first["gpus"][0]["distance"], "same PCIe switch");
  EXPECT_EQ(first["gpus"][1]["distance"], "another NUMA node");
  const auto& second = (*report)["ports"][1];
  EXPECT_EQ(second["used"], false);
  EXPECT_EQ(second["why_not"], "its port is down");
}

TEST_F(DeviceReport, RanksGidsAndSaysWhy) {
  const auto report = describe({device("mlx5_0")});
  ASSERT_TRUE(report) << report.status().to_string();
  const auto& gids = (*report)["ports"][0]["gids"];
  ASSERT_EQ(gids.size(), 2u);
  EXPECT_EQ(gids[0]["rank"], 0);
  EXPECT_EQ(gids[0]["why"], "left out: no interface of this host has this address");
  EXPECT_EQ(gids[1]["index"], 3);
  EXPECT_EQ(gids[1]["rank"], 1);
  EXPECT_EQ(gids[1]["address"], "127.0.0.1");
  EXPECT_EQ(gids[1]["why"].get<std::string>().rfind("chosen: ", 0), 0u);
}

TEST_F(DeviceReport, OrdersDevicesForEachMemory) {
  const auto report = describe({device("mlx5_0"), device("mlx5_1")});
  ASSERT_TRUE(report) << report.status().to_string();
  const auto& memory = (*report)["memory"];
  ASSERT_EQ(memory.size(), 4u);
  EXPECT_EQ(memory[0]["memory"], "host, NUMA node 0");
  EXPECT_EQ(memory[0]["devices"][0]["name"], "mlx5_0:1");
  EXPECT_EQ(memory[1]["devices"][0]["name"], "mlx5_1:1");
  EXPECT_EQ(memory[1]["devices"][1]["distance"], "another NUMA node");
  EXPECT_EQ(memory[3]["memory"], "NVIDIA GPU 0000:82:00.0");
  EXPECT_EQ(memory[3]["devices"][0]["name"], "mlx5_1:1");
  const std::string text = devices_as_text(*report);
  EXPECT_NE(text.find("host, NUMA node 1:  mlx5_1:1 (same NUMA node)  mlx5_0:1 (another NUMA node)"), std::string::npos)
      << text;
}

TEST_F(DeviceReport, WithoutDevicesSaysHowToGetOne) {
  const auto report = describe({});
  ASSERT_TRUE(report) << report.status().to_string();
  EXPECT_TRUE((*report)["ports"].empty());
  EXPECT_NE(devices_as_text(*report).find("rdma link add"), std::string::npos);
}

TEST_F(DeviceReport, ADeviceThatDoesNotExistIsAnError) {
  VerbsConfig config;
  config.devices = {"mlx5_7"};
  EXPECT_EQ(describe({}, config).status(), Errc::invalid_argument);
  const auto report = describe({device("mlx5_0")}, config);
  ASSERT_FALSE(report);
  EXPECT_EQ(report.status(), Errc::invalid_argument);
  EXPECT_NE(report.status().text().find("mlx5_0:1"), std::string_view::npos) << report.status().text();
}

TEST_F(DeviceReport, SaysWhenConfigurationLeavesAPortOut) {
  VerbsConfig config;
  config.devices = {"mlx5_1"};
  const auto report = describe({device("mlx5_0"), device("mlx5_1")}, config);
  ASSERT_TRUE(report) << report.status().to_string();
  EXPECT_EQ((*report)["ports"][0]["why_not"], "verbs.devices does not name it");
  EXPECT_EQ((*report)["memory"][0]["devices"].size(), 1u);
}

}  // namespace
}  // namespace kvferry::bench
