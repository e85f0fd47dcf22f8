// RDMA devices: which exist, which are used, and what each can do.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/api.hpp>
#include <kvferry/transports/verbs/gid.hpp>
#include <kvferry/transports/verbs/topology.hpp>

namespace kvferry::verbs {

/// One port of one device as the system describes it; for choosing and for showing.
struct PortFacts {
  std::string device;     ///< such as "mlx5_0"
  std::uint8_t port = 1;  ///< counted from 1
  bool active = false;
  std::string state;       ///< "active", "down", ...
  bool ethernet = true;    ///< RoCE or iWARP; else InfiniBand
  std::uint32_t gbit = 0;  ///< signalling rate, Gb/s; 0 when not told
  std::uint32_t mtu = 0;   ///< active MTU, bytes
  PciSlot slot;            ///< empty for software devices
  std::uint16_t lid = 0;   ///< InfiniBand
  std::vector<Gid> gids;   ///< ranked, see rank_gids()
  std::vector<Gid> table;  ///< all that the port has, by index

  std::string name() const;  ///< "mlx5_0:1"
};

/// Asks every device about every port. Errors: unsupported when there is no device or no driver.
Result<std::vector<PortFacts>> list_ports(Api& api, const Topology& topology = Topology());

/// Why an engine with this configuration can not use the port; empty when it can.
std::string why_unusable(const PortFacts& port, const VerbsConfig& config);

/// Those that an engine with this configuration uses, best first: active, of the wanted names, in the
/// order of those names or by rate. Errors: invalid_argument for a name that no device has (the text lists
/// those that exist), no_path when nothing usable is left (the text says why for each).
Result<std::vector<PortFacts>> choose_ports(std::vector<PortFacts> ports, const VerbsConfig& config);

/// An open device, shared by its ports.
class Context {
 public:
  static Result<std::shared_ptr<Context>> open(Api& api, const std::string& device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Api& api() const noexcept { return api_; }
  ibv_context* get() const noexcept { return context_; }
  ibv_pd* domain() const noexcept { return domain_; }
  const ibv_device_attr& limits() const noexcept { return limits_; }
  int event_fd() const noexcept { return context_->async_fd; }

  /// Reads what has happened to the device. Any port of it may call; what all must know is in the two
  /// functions below.
  void read_events();
  bool lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  /// Rises with each event that makes the port unusable.
  std::uint32_t port_losses(std::uint8_t port) const noexcept {
    return port < port_losses_.size() ? port_losses_[port].load(std::memory_order_acquire) : 0;
  }

 private:
  Context(Api& api, std::string name) : api_(api), name_(std::move(name)) {}
  Status start(ibv_device* device);

  Api& api_;
  const std::string name_;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_device_attr limits_{};
  std::atomic<bool> lost_{false};
  std::array<std::atomic<std::uint32_t>, 16> port_losses_{};
};

/// One port that the engine uses.
struct Device {
  PortFacts facts;
  std::shared_ptr<Context> context;

  std::uint64_t max_message_bytes = 1 << 30;  ///< of one request
  std::uint32_t mtu = 1024;                   ///< bytes
};

/// Opens the chosen ports, in their order.
Result<std::vector<Device>> open_devices(Api& api, const VerbsConfig& config, const Topology& topology = Topology());

}  // namespace kvferry::verbs
