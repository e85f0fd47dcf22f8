#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <kvferry/actors/bootstrap.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

constexpr int portion = 64;
constexpr std::size_t dealer_queue = 64;
constexpr auto zap_address = "inproc://zeromq.zap.01";

std::span<const std::byte> bytes_of(const zmq::message_t& message) {
  return {static_cast<const std::byte*>(message.data()), message.size()};
}

std::string z85(const void* key) {
  char text[41];
  return zmq_z85_encode(text, static_cast<const std::uint8_t*>(key), 32) ? std::string(text) : std::string();
}

}  // namespace

Result<ControlListener> ControlListener::bind(zmq::context_t& context, const std::string& address,
                                              const CurveKeys& keys) {
  ControlListener listener;
  try {
    if (!keys.secret_key.empty()) {
      listener.zap_ = zmq::socket_t(context, ZMQ_REP);
      listener.zap_.set(zmq::sockopt::linger, 0);
      listener.zap_.bind(zap_address);
    }
    listener.router_ = zmq::socket_t(context, ZMQ_ROUTER);
    zmq::socket_t& router = listener.router_;
    router.set(zmq::sockopt::linger, 0);
    // Only for such addresses: otherwise the bound address reads as an IPv4-mapped one.
    router.set(zmq::sockopt::ipv6, address.find('[') != std::string::npos);
    router.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(max_control_bytes));
    router.set(zmq::sockopt::handshake_ivl, 5000);
    if (!keys.secret_key.empty()) {
      router.set(zmq::sockopt::curve_server, true);
      router.set(zmq::sockopt::curve_secretkey, keys.secret_key);
      router.set(zmq::sockopt::zap_domain, "kvferry");
    }
    // ZeroMQ writes a port to be chosen as '*'.
    const bool any_port = address.ends_with(":0");
    router.bind(any_port ? address.substr(0, address.size() - 1) + "*" : address);
    listener.address_ = router.get(zmq::sockopt::last_endpoint);
    return listener;
  } catch (const zmq::error_t& e) {
    if (e.num() == EADDRINUSE)
      return {Errc::address_in_use, fmt::format("cannot listen on {}: the port is in use; choose another, or port 0 "
                                                "for a free one",
                                                address)};
    return {Errc::invalid_argument, fmt::format("cannot listen on {}: {}", address, e.what())};
  }
}

BootstrapActor::BootstrapActor(caf::actor_config& config, zmq::context_t* context, ControlListener listener,
                               std::shared_ptr<BootstrapService> service, CurveKeys keys, Duration session_limit)
    : caf::blocking_actor(config),
      context_(context),
      listener_(std::move(listener)),
      service_(std::move(service)),
      keys_(std::move(keys)),
      session_limit_(session_limit),
      wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

BootstrapActor::~BootstrapActor() {
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

void BootstrapActor::enqueue(caf::mailbox_element_ptr element, caf::execution_unit* unit) {
  caf::blocking_actor::enqueue(std::move(element), unit);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed) && asleep_.exchange(false)) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_fd_, &one, sizeof one);
  }
}

void BootstrapActor::act() {
  ::prctl(PR_SET_NAME, "kvferry-control");
  TimePoint next_expiry = Clock::now();
  while (!stopping_) {
    try {
      receive_some();
      serve_router();
      if (!keys_.secret_key.empty()) serve_zap();
      for (auto& [number, line] : lines_) serve_line(line);
      if (const TimePoint now = Clock::now(); now >= next_expiry) {
        service_->expire_sessions(now - session_limit_);
        next_expiry = now + std::chrono::seconds(1);
      }
      if (!stopping_) sleep();
    } catch (const zmq::error_t& e) {
      log(LogLevel::error, fmt::format("control sockets: {}", e.what()));
    }
  }
  while (!lines_.empty()) hang_up(lines_.begin()->first);
  listener_ = {};
}

void BootstrapActor::receive_some() {
  for (int i = 0; i < portion && !mailbox().empty(); ++i) {
    receive(
        [this](const Dial& request) { dial(request); }, [this](const SendControl& control) { send_control(control); },
        [this](const PortAnswered& answered) { send_port_answer(answered); },
        [this](const HangUp& request) { hang_up(request.line); }, [this](StopBootstrap) { stopping_ = true; },
        caf::others >> [](caf::message_view&) -> caf::result<caf::message> { return caf::sec::unexpected_message; });
  }
}

void BootstrapActor::dial(const Dial& request) {
  try {
    Line line{zmq::socket_t(*context_, ZMQ_DEALER), request.endpoint};
    zmq::socket_t& dealer = line.dealer;
    dealer.set(zmq::sockopt::linger, 0);
    dealer.set(zmq::sockopt::ipv6, request.address.find('[') != std::string::npos);
    dealer.set(zmq::sockopt::sndhwm, static_cast<int>(dealer_queue));
    dealer.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(max_control_bytes));
    dealer.set(zmq::sockopt::reconnect_ivl, 50);
    dealer.set(zmq::sockopt::reconnect_ivl_max, 1000);
    if (!keys_.secret_key.empty()) {
      dealer.set(zmq::sockopt::curve_publickey, keys_.public_key);
      dealer.set(zmq::sockopt::curve_secretkey, keys_.secret_key);
      dealer.set(zmq::sockopt::curve_serverkey, keys_.server_key);
    }
    dealer.connect(request.address);
    lines_.insert_or_assign(request.line, std::move(line));
  } catch (const zmq::error_t& e) {
    send(request.endpoint,
         ControlRefused{{Errc::unreachable, fmt::format("cannot connect to {}: {}", request.address, e.what())}});
  }
}

void BootstrapActor::hang_up(std::uint64_t number) {
  const auto found = lines_.find(number);
  if (found == lines_.end()) return;
  // What the endpoint had to say last, such as bye, gets a moment to leave.
  found->second.dealer.set(zmq::sockopt::linger, 100);
  lines_.erase(found);
}

void BootstrapActor::send_control(const SendControl& control) {
  const auto found = lines_.find(control.line);
  if (found == lines_.end()) return;
  // A full queue drops the message: its sender has a time limit and asks again.
  found->second.dealer.send(zmq::buffer(control.bytes), zmq::send_flags::dontwait);
}

void BootstrapActor::send_port_answer(const PortAnswered& answered) {
  zmq::socket_t& router = listener_.router();
  router.send(zmq::buffer(answered.routing), zmq::send_flags::sndmore | zmq::send_flags::dontwait);
  router.send(zmq::buffer(BootstrapService::encode_port_answer(answered.id, answered.answer)),
              zmq::send_flags::dontwait);
}

void BootstrapActor::serve_router() {
  zmq::socket_t& router = listener_.router();
  for (int i = 0; i < portion; ++i) {
    zmq::message_t peer;
    if (!router.recv(peer, zmq::recv_flags::dontwait)) return;
    zmq::message_t body;
    int parts = 0;
    while (router.get(zmq::sockopt::rcvmore)) {
      zmq::message_t part;
      if (!router.recv(part, zmq::recv_flags::none)) break;
      if (parts++ == 0) body = std::move(part);
    }
    if (parts != 1) continue;
    const auto later = [self = caf::actor_cast<caf::actor>(this), routing = peer.to_string()](
                           std::uint64_t id, Result<std::string> served) {
      caf::anon_send(self, PortAnswered{routing, id, std::move(served)});
    };
    const auto answer = service_->answer(bytes_of(body), Clock::now(), later);
    if (!answer) continue;
    router.send(peer, zmq::send_flags::sndmore | zmq::send_flags::dontwait);
    router.send(zmq::buffer(*answer), zmq::send_flags::dontwait);
  }
}

void BootstrapActor::serve_zap() {
  zmq::socket_t& zap = listener_.zap();
  for (int i = 0; i < portion; ++i) {
    std::vector<zmq::message_t> frames;
    zmq::message_t frame;
    if (!zap.recv(frame, zmq::recv_flags::dontwait)) return;
    frames.push_back(std::move(frame));
    while (zap.get(zmq::sockopt::rcvmore)) {
      zmq::message_t more;
      if (!zap.recv(more, zmq::recv_flags::none)) break;
      frames.push_back(std::move(more));
    }
    // version, request id, domain, address, identity, mechanism, public key
    bool granted = frames.size() == 7 && frames[5].to_string_view() == "CURVE" && frames[6].size() == 32;
    if (granted && !keys_.peer_keys.empty())
      granted =
          std::find(keys_.peer_keys.begin(), keys_.peer_keys.end(), z85(frames[6].data())) != keys_.peer_keys.end();
    if (!granted) log(LogLevel::warning, "refused a connection: its CurveZMQ key is not among the allowed peer keys");
    const std::string id = frames.size() > 1 ? frames[1].to_string() : std::string();
    for (const std::string& text : {std::string("1.0"), id, std::string(granted ? "200" : "400"),
                                    std::string(granted ? "OK" : "key not allowed"), std::string()})
      zap.send(zmq::buffer(text), zmq::send_flags::sndmore);
    zap.send(zmq::message_t(), zmq::send_flags::none);
  }
}

void BootstrapActor::serve_line(Line& line) {
  for (int i = 0; i < portion; ++i) {
    zmq::message_t body;
    if (!line.dealer.recv(body, zmq::recv_flags::dontwait)) return;
    bool single = true;
    while (line.dealer.get(zmq::sockopt::rcvmore)) {
      zmq::message_t part;
      if (!line.dealer.recv(part, zmq::recv_flags::none)) break;
      single = false;
    }
    if (!single) continue;
    auto message = decode(bytes_of(body));
    if (message)
      send(line.endpoint, ControlArrived{std::move(*message)});
    else
      send(line.endpoint, ControlRefused{message.status()});
  }
}

void BootstrapActor::sleep() {
  std::vector<zmq::pollitem_t> items;
  items.push_back({nullptr, wake_fd_, ZMQ_POLLIN, 0});
  items.push_back({listener_.router().handle(), 0, ZMQ_POLLIN, 0});
  if (!keys_.secret_key.empty()) items.push_back({listener_.zap().handle(), 0, ZMQ_POLLIN, 0});
  for (auto& [number, line] : lines_) items.push_back({line.dealer.handle(), 0, ZMQ_POLLIN, 0});
  asleep_.store(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (mailbox().empty()) zmq::poll(items, std::chrono::milliseconds(1000));
  asleep_.store(false);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(wake_fd_, &count, sizeof count);
}

}  // namespace kvferry
