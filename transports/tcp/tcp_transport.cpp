#include "tcp_transport.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "port.hpp"
#include "wire.hpp"

namespace kvferry {
namespace {

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(const TcpConfig& config) : config_(config) {
    config_.sockets = std::clamp(config.sockets, 1, static_cast<int>(tcp::max_sockets));
    config_.chunk_bytes = std::max<std::uint64_t>(config.chunk_bytes, 4096);
  }

  std::string_view name() const override { return "tcp"; }
  Status reaches(const HostFacts& /*self*/, const HostFacts& /*peer*/) const override { return {}; }

  Result<std::string> register_region(const RegionRecord& region) override {
    if (region.kind == MemoryKind::host) return std::string();
    return {Errc::unsupported, fmt::format("tcp: region '{}' is GPU memory; tcp carries host memory", region.name)};
  }
  void unregister_region(const RegionRecord& /*region*/) override {}

  Result<std::unique_ptr<Port>> open_port(const PortContext& context, PortEvents& events) override {
    return tcp::TcpPort::open(config_, context, events);
  }

 private:
  TcpConfig config_;
};

}  // namespace

std::shared_ptr<Transport> make_tcp_transport(const TcpConfig& config) {
  return std::make_shared<TcpTransport>(config);
}

}  // namespace kvferry
