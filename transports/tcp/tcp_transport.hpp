// The TCP transport: works between any two hosts.
#pragma once

#include <memory>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry {

std::shared_ptr<Transport> make_tcp_transport(const TcpConfig& config);

}  // namespace kvferry
