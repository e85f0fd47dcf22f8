#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <kvferry/transports/shm/port.hpp>
#include <kvferry/transports/shm/shm_transport.hpp>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvferry {
namespace {

/// Makes sure that peers can map the region without danger to themselves.
Status seal(const RegionRecord& region) {
  struct stat facts {};
  if (::fstat(region.memfd, &facts) != 0 || static_cast<std::uint64_t>(facts.st_size) < region.size)
    return {Errc::invalid_argument,
            fmt::format("shm: region '{}' of {} bytes: its memfd holds {}", region.name, region.size, facts.st_size)};
  const int seals = ::fcntl(region.memfd, F_GET_SEALS);
  if (seals < 0 || ((seals & F_SEAL_SHRINK) == 0 && ::fcntl(region.memfd, F_ADD_SEALS, F_SEAL_SHRINK) != 0))
    return {Errc::unsupported,
            fmt::format("shm: region '{}': its memfd can not be sealed against shrinking ({}): create it with "
                        "MFD_ALLOW_SEALING, or register the memory without it",
                        region.name, std::strerror(errno))};
  // The owner's mapping stays writable, later ones do not become so, not even through /proc. Kernels
  // before 5.1 lack this seal; there the read-only descriptor that peers get has to do.
  if (!allows(region.access, Access::write) && !allows(region.leasable, Access::write))
    ::fcntl(region.memfd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  return {};
}

class ShmTransport final : public Transport {
 public:
  ShmTransport(const ShmConfig& config, const shm::Options& options) : config_(config), options_(options) {}

  std::string_view name() const override { return "shm"; }

  bool one_sided() const override { return true; }
  Status reaches(const HostFacts& self, const HostFacts& peer) const override {
    if (!self.host_id.empty() && self.host_id == peer.host_id) return {};
    return {Errc::no_path, fmt::format("shm: the engines run under different kernels (host id '{}' here, '{}' there)",
                                       self.host_id, peer.host_id)};
  }

  Result<std::string> register_region(const RegionRecord& region) override {
    if (region.kind != MemoryKind::host)
      return {Errc::unsupported,
              fmt::format("shm: region '{}' is GPU memory, only host memory is shared", region.name)};
    if (region.memfd >= 0 && !region.lease)  // a lease's memory was sealed with its region
      if (Status status = seal(region); !status) return status;
    // Peers ask for everything else over their channel, where rights are checked at that moment.
    return std::string();
  }

  void unregister_region(const RegionRecord&) override {}

  Result<std::unique_ptr<Port>> open_port(const PortContext& context, PortEvents& events) override {
    return shm::ShmPort::open(config_, options_, context, events);
  }

 private:
  const ShmConfig config_;
  const shm::Options options_;
};

}  // namespace

std::shared_ptr<Transport> make_shm_transport(const ShmConfig& config) {
  return make_shm_transport(config, shm::Options());
}

std::shared_ptr<Transport> make_shm_transport(const ShmConfig& config, const shm::Options& options) {
  return std::make_shared<ShmTransport>(config, options);
}

}  // namespace kvferry
