#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/runtime/config.hpp>

namespace kvferry {
namespace {

const std::string key_a(40, 'a');
const std::string key_b(40, 'b');

bool has(const Status& status, std::string_view part) { return status.text().find(part) != std::string_view::npos; }

class Config : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }

  static void set(const std::string& variable, const std::string& value) {
    ::setenv(variable.c_str(), value.c_str(), 1);
  }

 private:
  static void clear() {
    for (const ConfigField& field : config_fields()) ::unsetenv(field.variable.c_str());
  }
};

TEST_F(Config, DefaultsAreValid) { EXPECT_TRUE(EngineConfig().validate()) << EngineConfig().validate().text(); }

TEST_F(Config, NoVariableChangesNothing) {
  EngineConfig config{.name = "decode-0", .rails = 3};
  EXPECT_TRUE(config.apply_environment());
  EXPECT_EQ(config.name, "decode-0");
  EXPECT_EQ(config.rails, 3);
}

TEST_F(Config, EveryVariableSetsItsField) {
  using namespace std::chrono_literals;
  using Check = std::function<bool(const EngineConfig&)>;
  const std::map<std::string, std::pair<std::string, Check>> cases{
      {"KVFERRY_NAME", {"decode-7", [](auto& c) { return c.name == "decode-7"; }}},
      {"KVFERRY_LISTEN", {"tcp://0.0.0.0:7000", [](auto& c) { return c.listen == "tcp://0.0.0.0:7000"; }}},
      {"KVFERRY_ADVERTISE", {"10.0.0.7", [](auto& c) { return c.advertise == "10.0.0.7"; }}},
      {"KVFERRY_TRANSPORTS",
       {"tcp,shm",
        [](auto& c) {
          return c.transports == std::vector<std::string>{"tcp", "shm"};
        }}},
      {"KVFERRY_RAILS", {"5", [](auto& c) { return c.rails == 5; }}},
      {"KVFERRY_POLLERS", {"2", [](auto& c) { return c.pollers == 2; }}},
      {"KVFERRY_CONNECT_TIMEOUT_MS", {"77", [](auto& c) { return c.connect_timeout == 77ms; }}},
      {"KVFERRY_TRANSFER_TIMEOUT_MS", {"78", [](auto& c) { return c.transfer_timeout == 78ms; }}},
      {"KVFERRY_HEARTBEAT_INTERVAL_MS", {"79", [](auto& c) { return c.heartbeat_interval == 79ms; }}},
      {"KVFERRY_PEER_TIMEOUT_MS", {"800", [](auto& c) { return c.peer_timeout == 800ms; }}},
      {"KVFERRY_DRAIN_GRACE_MS", {"0", [](auto& c) { return c.drain_grace == 0ms; }}},
      {"KVFERRY_POLL_SPIN_US", {"12", [](auto& c) { return c.poll_spin == 12us; }}},
      {"KVFERRY_WAIT_SPIN_US", {"13", [](auto& c) { return c.wait_spin == 13us; }}},
      {"KVFERRY_SPLIT_BYTES", {"5000000000", [](auto& c) { return c.split_bytes == 5'000'000'000; }}},
      {"KVFERRY_TCP_SOCKETS", {"9", [](auto& c) { return c.tcp.sockets == 9; }}},
      {"KVFERRY_TCP_CHUNK_BYTES", {"65536", [](auto& c) { return c.tcp.chunk_bytes == 65536; }}},
      {"KVFERRY_TCP_SOCKET_BUFFER_BYTES", {"0", [](auto& c) { return c.tcp.socket_buffer_bytes == 0; }}},
      {"KVFERRY_SHM", {"off", [](auto& c) { return !c.shm.enabled; }}},
      {"KVFERRY_SHM_COPY_THREADS", {"3", [](auto& c) { return c.shm.copy_threads == 3; }}},
      {"KVFERRY_SHM_WAITERS_COPY", {"off", [](auto& c) { return !c.shm.waiters_copy; }}},
      {"KVFERRY_SHM_CHUNK_BYTES", {"8192", [](auto& c) { return c.shm.chunk_bytes == 8192; }}},
      {"KVFERRY_SHM_STREAMING_BYTES", {"0", [](auto& c) { return c.shm.streaming_bytes == 0; }}},
      {"KVFERRY_VERBS", {"off", [](auto& c) { return !c.verbs.enabled; }}},
      {"KVFERRY_VERBS_CONNECT", {"rdmacm", [](auto& c) { return c.verbs.connect == VerbsConnect::rdmacm; }}},
      {"KVFERRY_VERBS_DEVICES",
       {"mlx5_1,mlx5_0:2",
        [](auto& c) {
          return c.verbs.devices == std::vector<std::string>{"mlx5_1", "mlx5_0:2"};
        }}},
      {"KVFERRY_VERBS_QUEUE_PAIRS", {"4", [](auto& c) { return c.verbs.queue_pairs == 4; }}},
      {"KVFERRY_VERBS_QUEUE_DEPTH", {"64", [](auto& c) { return c.verbs.queue_depth == 64; }}},
      {"KVFERRY_VERBS_CHUNK_BYTES", {"65536", [](auto& c) { return c.verbs.chunk_bytes == 65536; }}},
      {"KVFERRY_VERBS_GID_INDEX", {"3", [](auto& c) { return c.verbs.gid_index == 3; }}},
      {"KVFERRY_VERBS_MTU", {"2048", [](auto& c) { return c.verbs.mtu == 2048; }}},
      {"KVFERRY_VERBS_TIMEOUT", {"18", [](auto& c) { return c.verbs.timeout == 18; }}},
      {"KVFERRY_VERBS_RETRIES", {"3", [](auto& c) { return c.verbs.retries == 3; }}},
      {"KVFERRY_VERBS_RNR_TIMER", {"1", [](auto& c) { return c.verbs.rnr_timer == 1; }}},
      {"KVFERRY_VERBS_TRAFFIC_CLASS", {"106", [](auto& c) { return c.verbs.traffic_class == 106; }}},
      {"KVFERRY_VERBS_SERVICE_LEVEL", {"5", [](auto& c) { return c.verbs.service_level == 5; }}},
      {"KVFERRY_VERBS_RELAXED_ORDERING", {"on", [](auto& c) { return c.verbs.relaxed_ordering; }}},
      {"KVFERRY_CURVE_PUBLIC_KEY", {key_a, [](auto& c) { return c.curve_public_key == key_a; }}},
      {"KVFERRY_CURVE_SECRET_KEY", {key_b, [](auto& c) { return c.curve_secret_key == key_b; }}},
      {"KVFERRY_CURVE_PEER_KEYS",
       {key_a + "," + key_b,
        [](auto& c) {
          return c.curve_peer_keys == std::vector<std::string>{key_a, key_b};
        }}},
      {"KVFERRY_CURVE_SERVER_KEY", {key_b, [](auto& c) { return c.curve_server_key == key_b; }}},
  };
  std::set<std::string> covered;
  for (const auto& [variable, value] : cases) {
    EXPECT_FALSE(value.second(EngineConfig())) << variable << ": the test would pass without the variable";
    set(variable, value.first);
    covered.insert(variable);
  }
  EngineConfig config;
  ASSERT_TRUE(config.apply_environment());
  for (const auto& [variable, value] : cases) EXPECT_TRUE(value.second(config)) << variable;
  EXPECT_TRUE(config.validate()) << config.validate().text();
  for (const ConfigField& field : config_fields()) EXPECT_TRUE(covered.count(field.variable)) << field.variable;
}

TEST_F(Config, ValuesThatDoNotParseNameTheVariable) {
  for (const auto& [variable, value] :
       std::vector<std::pair<std::string, std::string>>{{"KVFERRY_RAILS", "many"},
                                                        {"KVFERRY_RAILS", ""},
                                                        {"KVFERRY_RAILS", "4 "},
                                                        {"KVFERRY_RAILS", "4294967297"},
                                                        {"KVFERRY_CONNECT_TIMEOUT_MS", "5s"},
                                                        {"KVFERRY_SPLIT_BYTES", "99999999999999999999"},
                                                        {"KVFERRY_SPLIT_BYTES", "0x10"},
                                                        {"KVFERRY_SHM", "yes"}}) {
    set(variable, value);
    EngineConfig config;
    const Status status = config.apply_environment();
    EXPECT_EQ(status.code(), Errc::invalid_argument) << variable << "=" << value;
    EXPECT_TRUE(has(status, variable)) << status.text();
    ::unsetenv(variable.c_str());
  }
}

TEST_F(Config, ValuesOutOfRangeNameFieldValueAndRange) {
  using Change = std::function<void(EngineConfig&)>;
  using std::chrono::microseconds;
  using std::chrono::milliseconds;
  struct Case {
    std::string field;
    std::string value;
    Change change;
  };
  const std::vector<Case> cases{
      {"name", std::string(256, 'x'), [](auto& c) { c.name = std::string(256, 'x'); }},
      {"name", "a\nb", [](auto& c) { c.name = "a\nb"; }},
      {"listen", "udp://h:1", [](auto& c) { c.listen = "udp://h:1"; }},
      {"listen", "tcp://h", [](auto& c) { c.listen = "tcp://h"; }},
      {"listen", "tcp://:5", [](auto& c) { c.listen = "tcp://:5"; }},
      {"listen", "tcp://h:65536", [](auto& c) { c.listen = "tcp://h:65536"; }},
      {"listen", "tcp://h:", [](auto& c) { c.listen = "tcp://h:"; }},
      {"listen", "tcp://a b:1", [](auto& c) { c.listen = "tcp://a b:1"; }},
      {"advertise", "tcp://h", [](auto& c) { c.advertise = "tcp://h"; }},
      {"transports", "pigeon", [](auto& c) { c.transports = {"pigeon"}; }},
      {"transports", "tcp,tcp",
       [](auto& c) {
         c.transports = {"tcp", "tcp"};
       }},
      {"transports", ",tcp",
       [](auto& c) {
         c.transports = {"", "tcp"};
       }},
      {"rails", "0", [](auto& c) { c.rails = 0; }},
      {"rails", "17", [](auto& c) { c.rails = 17; }},
      {"pollers", "-1", [](auto& c) { c.pollers = -1; }},
      {"pollers", "17", [](auto& c) { c.pollers = 17; }},
      {"connect_timeout", "0", [](auto& c) { c.connect_timeout = milliseconds(0); }},
      {"transfer_timeout", "0", [](auto& c) { c.transfer_timeout = milliseconds(0); }},
      {"heartbeat_interval", "0", [](auto& c) { c.heartbeat_interval = milliseconds(0); }},
      {"peer_timeout", "1", [](auto& c) { c.peer_timeout = milliseconds(1); }},
      {"drain_grace", "-1", [](auto& c) { c.drain_grace = milliseconds(-1); }},
      {"poll_spin", "1000001", [](auto& c) { c.poll_spin = microseconds(1'000'001); }},
      {"wait_spin", "-1", [](auto& c) { c.wait_spin = microseconds(-1); }},
      {"split_bytes", "0", [](auto& c) { c.split_bytes = 0; }},
      {"tcp.sockets", "65", [](auto& c) { c.tcp.sockets = 65; }},
      {"tcp.chunk_bytes", "4095", [](auto& c) { c.tcp.chunk_bytes = 4095; }},
      {"tcp.socket_buffer_bytes", "-1", [](auto& c) { c.tcp.socket_buffer_bytes = -1; }},
      {"shm.copy_threads", "65", [](auto& c) { c.shm.copy_threads = 65; }},
      {"shm.chunk_bytes", "67108865", [](auto& c) { c.shm.chunk_bytes = (64 << 20) + 1; }},
      {"shm.streaming_bytes", "-1", [](auto& c) { c.shm.streaming_bytes = ~std::uint64_t{0}; }},
      {"curve_public_key", "short", [](auto& c) { c.curve_public_key = "short"; }},
      {"curve_peer_keys", "short", [](auto& c) { c.curve_peer_keys = {"short"}; }},
      {"curve_server_key", std::string(40, '~'), [](auto& c) { c.curve_server_key = std::string(40, '~'); }},
  };
  std::map<std::string, std::string> ranges;
  for (const ConfigField& field : config_fields()) ranges[field.name] = field.range;
  for (const Case& wrong : cases) {
    EngineConfig config;
    wrong.change(config);
    const Status status = config.validate();
    EXPECT_EQ(status.code(), Errc::invalid_argument) << wrong.field << " = " << wrong.value;
    EXPECT_EQ(status.text().rfind(wrong.field + " = '" + wrong.value + "'", 0), 0u) << status.text();
    EXPECT_TRUE(has(status, "expected " + ranges.at(wrong.field))) << status.text();
  }
}

TEST_F(Config, AddressesOfEveryFamilyAreTaken) {
  for (const char* listen :
       {"tcp://127.0.0.1:0", "tcp://*:5555", "tcp://[::1]:65535", "tcp://node-7.cluster.local:80"}) {
    EngineConfig config;
    config.listen = listen;
    EXPECT_TRUE(config.validate()) << listen;
  }
}

TEST_F(Config, TheSecretKeyIsNeverShown) {
  EngineConfig config;
  config.curve_secret_key = "my-secret";
  const Status status = config.validate();
  EXPECT_EQ(status.code(), Errc::invalid_argument);
  EXPECT_TRUE(has(status, "curve_secret_key")) << status.text();
  EXPECT_FALSE(has(status, "my-secret")) << status.text();
}

TEST_F(Config, CurveKeysComeAsAPair) {
  EngineConfig config;
  config.curve_public_key = key_a;
  EXPECT_TRUE(has(config.validate(), "curve_public_key is set without curve_secret_key"));
  config.curve_secret_key = key_b;
  config.curve_peer_keys = {key_a, key_b};
  config.curve_server_key = key_a;
  EXPECT_TRUE(config.validate());
  config.curve_public_key.clear();
  config.curve_secret_key.clear();
  EXPECT_TRUE(has(config.validate(), "curve_peer_keys is set without"));
}

TEST_F(Config, OneLateHeartbeatMustNotLoseThePeer) {
  EngineConfig config;
  config.heartbeat_interval = std::chrono::milliseconds(500);
  config.peer_timeout = std::chrono::milliseconds(999);
  EXPECT_TRUE(has(config.validate(), "peer_timeout"));
  config.peer_timeout = std::chrono::milliseconds(1000);
  EXPECT_TRUE(config.validate());
}

TEST_F(Config, FieldsAreDocumentedOnce) {
  std::set<std::string> names;
  std::set<std::string> variables;
  for (const ConfigField& field : config_fields()) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_TRUE(variables.insert(field.variable).second) << field.variable;
    EXPECT_EQ(field.variable.rfind("KVFERRY_", 0), 0u);
    EXPECT_FALSE(field.range.empty()) << field.name;
    EXPECT_FALSE(field.text.empty()) << field.name;
  }
}

TEST_F(Config, FallbacksAreTheDefaults) {
  for (const ConfigField& field : config_fields()) set(field.variable, field.fallback);
  EngineConfig config;
  ASSERT_TRUE(config.apply_environment());
  EXPECT_EQ(config.listen, EngineConfig().listen);
  EXPECT_EQ(config.transfer_timeout, EngineConfig().transfer_timeout);
  EXPECT_EQ(config.tcp.chunk_bytes, EngineConfig().tcp.chunk_bytes);
  EXPECT_EQ(config.shm.enabled, EngineConfig().shm.enabled);
  EXPECT_EQ(config.transports, EngineConfig().transports);
}

}  // namespace
}  // namespace kvferry
