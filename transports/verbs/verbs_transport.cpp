#include <utility>

#include <kvferry/transports/verbs/port.hpp>
#include <kvferry/transports/verbs/verbs_transport.hpp>

namespace kvferry {
namespace {

class VerbsTransport final : public Transport {
 public:
  VerbsTransport(const VerbsConfig& config, verbs::Api& api, std::vector<verbs::Device> devices,
                 const verbs::Topology& topology)
      : config_(config),
        devices_(std::move(devices)),
        registrations_(api, devices_, config.relaxed_ordering, topology) {}

  std::string_view name() const override { return "verbs"; }
  bool one_sided() const override { return true; }
  std::uint32_t paths() const override { return static_cast<std::uint32_t>(devices_.size()); }
  Status reaches(const HostFacts& /*self*/, const HostFacts& /*peer*/) const override { return {}; }
  Result<std::string> register_region(const RegionRecord& region) override { return registrations_.add(region); }
  void unregister_region(const RegionRecord& region) override { registrations_.remove(region.key); }
  Result<std::unique_ptr<Port>> open_port(const PortContext& context, PortEvents& events) override {
    return verbs::VerbsPort::open(config_, devices_, registrations_, context, events);
  }

 private:
  const VerbsConfig config_;
  const std::vector<verbs::Device> devices_;
  verbs::Registrations registrations_;
};

}  // namespace

Result<std::shared_ptr<Transport>> make_verbs_transport(const VerbsConfig& config) {
  return make_verbs_transport(config, verbs::system_api());
}

Result<std::shared_ptr<Transport>> make_verbs_transport(const VerbsConfig& config, verbs::Api& api) {
  return make_verbs_transport(config, api, verbs::Topology());
}

Result<std::shared_ptr<Transport>> make_verbs_transport(const VerbsConfig& config, verbs::Api& api,
                                                        const verbs::Topology& topology) {
  auto devices = verbs::open_devices(api, config, topology);
  if (!devices) return devices.status();
  return std::shared_ptr<Transport>(std::make_shared<VerbsTransport>(config, api, std::move(*devices), topology));
}

}  // namespace kvferry
