#include <algorithm>
#include <atomic>
#include <cctype>
#include <thread>

#include <fmt/format.h>
#include <sys/prctl.h>
#include <zmq.hpp>

#include <kvferry/actors/directory_service.hpp>
#include <kvferry/actors/peer_table.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

constexpr int portion = 64;
constexpr auto stop_address = "inproc://stop";

// ZeroMQ takes a port above 65535 for another one.
bool has_port(const std::string& address) {
  const std::string port = address.substr(std::min(address.rfind(':'), address.size() - 1) + 1);
  if (port == "*") return true;
  const bool digits = !port.empty() && port.size() <= 5 &&
                      std::all_of(port.begin(), port.end(), [](unsigned char c) { return std::isdigit(c); });
  return digits && std::stoi(port) <= 65535;
}

}  // namespace

class DirectoryServer::Impl {
 public:
  Status start(const std::string& listen);
  ~Impl();
  const std::string& address() const { return address_; }

 private:
  void run();
  void serve(std::vector<DirectoryOutput>& output);
  void send(std::vector<DirectoryOutput>& output);

  zmq::context_t context_{1};
  zmq::socket_t router_;
  zmq::socket_t stop_;     ///< the thread's end
  zmq::socket_t stopper_;  ///< the destructor's end
  DirectoryService service_{random_u64()};
  std::string address_;
  std::thread thread_;
};

Status DirectoryServer::Impl::start(const std::string& listen) {
  if (!listen.starts_with("tcp://") || !has_port(listen))
    return {Errc::invalid_argument,
            fmt::format("the directory can not listen on '{}': give it as tcp://HOST:PORT, PORT 0 - 65535", listen)};
  try {
    router_ = zmq::socket_t(context_, ZMQ_ROUTER);
    router_.set(zmq::sockopt::linger, 0);
    router_.set(zmq::sockopt::ipv6, listen.find('[') != std::string::npos);
    router_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(max_directory_request));
    router_.set(zmq::sockopt::backlog, 4096);
    router_.set(zmq::sockopt::handshake_ivl, 5000);
    // Connections of clients that vanished without a word cost memory.
    router_.set(zmq::sockopt::heartbeat_ivl, 10000);
    router_.set(zmq::sockopt::heartbeat_timeout, 30000);
    router_.bind(listen);
    address_ = router_.get(zmq::sockopt::last_endpoint);
    stop_ = zmq::socket_t(context_, ZMQ_PAIR);
    stop_.bind(stop_address);
    stopper_ = zmq::socket_t(context_, ZMQ_PAIR);
    stopper_.connect(stop_address);
  } catch (const zmq::error_t& e) {
    const Errc code = e.num() == EADDRINUSE                             ? Errc::address_in_use
                      : e.num() == EINVAL || e.num() == EPROTONOSUPPORT ? Errc::invalid_argument
                                                                        : Errc::unreachable;
    return {code, fmt::format("the directory can not listen on '{}': {}; give it as tcp://HOST:PORT with an address of "
                              "this host and a free port",
                              listen, e.what())};
  }
  thread_ = std::thread([this] { run(); });
  return {};
}

DirectoryServer::Impl::~Impl() {
  if (!thread_.joinable()) return;
  stopper_.send(zmq::message_t(), zmq::send_flags::dontwait);
  thread_.join();
}

void DirectoryServer::Impl::run() {
  ::prctl(PR_SET_NAME, "kvferry-direct");
  std::vector<DirectoryOutput> output;
  while (true) {
    try {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(
          std::min<Duration>(service_.next_tick() - Clock::now(), std::chrono::seconds(1)));
      std::vector<zmq::pollitem_t> items{{router_.handle(), 0, ZMQ_POLLIN, 0}, {stop_.handle(), 0, ZMQ_POLLIN, 0}};
      zmq::poll(items, std::max(left, std::chrono::milliseconds(0)));
      if ((items[1].revents & ZMQ_POLLIN) != 0) return;
      serve(output);
      service_.tick(Clock::now(), output);
      send(output);
    } catch (const zmq::error_t& e) {
      log(LogLevel::error, fmt::format("directory sockets: {}", e.what()));
    }
  }
}

void DirectoryServer::Impl::serve(std::vector<DirectoryOutput>& output) {
  for (int i = 0; i < portion; ++i) {
    zmq::message_t client;
    if (!router_.recv(client, zmq::recv_flags::dontwait)) return;
    zmq::message_t body;
    int parts = 0;
    while (router_.get(zmq::sockopt::rcvmore)) {
      zmq::message_t part;
      if (!router_.recv(part, zmq::recv_flags::none)) break;
      if (parts++ == 0) body = std::move(part);
    }
    if (parts != 1) continue;
    service_.receive(client.to_string(), {static_cast<const std::byte*>(body.data()), body.size()}, Clock::now(),
                     output);
  }
}

// A client that does not read, or is gone, gets nothing; it asks again.
void DirectoryServer::Impl::send(std::vector<DirectoryOutput>& output) {
  for (const DirectoryOutput& one : output) {
    router_.send(zmq::buffer(one.routing), zmq::send_flags::sndmore | zmq::send_flags::dontwait);
    router_.send(zmq::buffer(one.bytes), zmq::send_flags::dontwait);
  }
  output.clear();
}

// ---------------------------------------------------------------- the face

Result<DirectoryServer> DirectoryServer::start(const std::string& listen) {
  auto impl = std::make_unique<Impl>();
  if (Status status = impl->start(listen); !status) return status;
  return DirectoryServer(std::move(impl));
}

DirectoryServer::DirectoryServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DirectoryServer::DirectoryServer(DirectoryServer&&) noexcept = default;
DirectoryServer& DirectoryServer::operator=(DirectoryServer&&) noexcept = default;
DirectoryServer::~DirectoryServer() = default;
const std::string& DirectoryServer::address() const { return impl_->address(); }

}  // namespace kvferry
