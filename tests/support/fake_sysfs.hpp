// A folder that looks like the parts of /sys that tell of PCI devices. Gone with the object.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace kvferry::test {

class FakeSysfs {
 public:
  FakeSysfs() {
    std::string name = (std::filesystem::temp_directory_path() / "kvferry-sysfs-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    root_ = name;
    std::filesystem::create_directories(root_ / "bus/pci/devices");
    std::filesystem::create_directories(root_ / "class/infiniband");
  }
  ~FakeSysfs() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  FakeSysfs(const FakeSysfs&) = delete;
  FakeSysfs& operator=(const FakeSysfs&) = delete;

  const std::filesystem::path& root() const { return root_; }

  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << '\n';
  }
  /// `path` from the root complex to the device.
  void add_pci_device(const std::string& path, int node, const std::string& kind, const std::string& vendor) const {
    const std::filesystem::path device = std::filesystem::path("devices") / path;
    write(device / "numa_node", std::to_string(node));
    write(device / "class", kind);
    write(device / "vendor", vendor);
    std::filesystem::create_directory_symlink(root_ / device, root_ / "bus/pci/devices" / device.filename());
  }
  void add_rdma_device(const std::string& name, const std::string& path, int node) const {
    add_pci_device(path, node, "0x020700", "0x15b3");
    add_software_device(name);
    std::filesystem::create_directory_symlink(root_ / "devices" / path, root_ / "class/infiniband" / name / "device");
  }
  /// An RDMA device without a slot.
  void add_software_device(const std::string& name) const {
    std::filesystem::create_directories(root_ / "class/infiniband" / name);
  }

 private:
  std::filesystem::path root_;
};

}  // namespace kvferry::test
