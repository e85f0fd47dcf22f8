// RDMA: one-sided reads and writes by the network card, over InfiniBand, RoCE or Soft-RoCE.
#pragma once

#include <memory>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry {

/// Opens the devices that the configuration names. Errors: unsupported when there is no RDMA here,
/// invalid_argument for a device that does not exist, no_path when no port can be used.
Result<std::shared_ptr<Transport>> make_verbs_transport(const VerbsConfig& config);

namespace verbs {
class Api;
class Topology;
}  // namespace verbs
/// The same over another set of verbs functions, which must outlive the transport, and in another host; for tests.
Result<std::shared_ptr<Transport>> make_verbs_transport(const VerbsConfig& config, verbs::Api& api);
Result<std::shared_ptr<Transport>> make_verbs_transport(const VerbsConfig& config, verbs::Api& api,
                                                        const verbs::Topology& topology);

}  // namespace kvferry
