// Serves a model that Python exported, over stdin and stdout, without Python.
//
//   program = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: Dim("B"), 1: Dim("L")},))
//   torch._inductor.aoti_compile_and_package(
//       program, package_path="model.pt2",
//       inductor_configs={"aot_inductor.metadata": {"features": str(x.shape[-1])}})
//   serve model.pt2 [largest batch]
//
// The model turns x [B, L, F], F its features, into a tensor whose first axis is B. A line of stdin
// is one sequence, its L F numbers separated by commas, token after token; a line of stdout is what
// the model made of it, or "error: " and a reason. Sequences of one length that have arrived
// together go through the model together.
#include <poll.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

// Lines of a file descriptor, and whether the next is there already.
class Lines {
 public:
  explicit Lines(int file) : file_(file) {}

  // Waits for the next line; nullopt at the end of the input.
  std::optional<std::string> next() {
    while (!has_line() && read_more()) {
    }
    if (unread_.empty()) return std::nullopt;
    const auto end = std::min(unread_.find('\n'), unread_.size());
    std::string line = unread_.substr(0, end);
    unread_.erase(0, end + 1);
    return line;
  }

  bool is_ready() {
    pollfd waiting{file_, POLLIN, 0};
    while (!has_line() && poll(&waiting, 1, /*timeout=*/0) > 0 && read_more()) {
    }
    return has_line();
  }

 private:
  bool has_line() const { return unread_.find('\n') != std::string::npos; }

  bool read_more() {
    char block[1 << 16];
    ssize_t count = 0;
    do {
      count = read(file_, block, sizeof block);
    } while (count < 0 && errno == EINTR);
    if (count <= 0) return false;
    unread_.append(block, static_cast<size_t>(count));
    return true;
  }

  int file_;
  std::string unread_;
};

// A number as float; what is too small for one is nearly 0.
std::optional<float> parse_number(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const float number = std::strtof(text.c_str(), &end);
  const bool is_whole = end + std::strspn(end, " ") == text.c_str() + text.size();
  if (end == text.c_str() || !is_whole) return std::nullopt;
  if (errno == ERANGE && std::isinf(number)) return std::nullopt;
  return number;
}

std::vector<float> parse_numbers(std::string line) {
  std::vector<float> numbers;
  if (line.ends_with('\r')) line.pop_back();
  for (size_t begin = 0, end = 0; end != line.npos; begin = end + 1) {
    end = line.find(',', begin);
    const auto text = line.substr(begin, end - begin);
    const auto number = parse_number(text);
    TORCH_CHECK(number.has_value(), "number ", numbers.size() + 1,
                " must be a number followed by a comma or the end, got '", text, "'");
    numbers.push_back(*number);
  }
  return numbers;
}

int64_t parse_largest_batch(std::string_view text) {
  int64_t number = 0;
  const auto end = text.data() + text.size();
  const auto [rest, failure] = std::from_chars(text.data(), end, number);
  TORCH_CHECK(failure == std::errc{} && rest == end && number > 0,
              "the largest batch must be a positive number, got '", text, "'");
  return number;
}

// A line of input as a tensor [L, F].
torch::Tensor parse_sequence(const std::string& line, int64_t features) {
  auto numbers = parse_numbers(line);
  const auto count = static_cast<int64_t>(numbers.size());
  TORCH_CHECK(count % features == 0, "a line must have a multiple of F = ", features,
              " numbers, got ", count);
  return torch::tensor(numbers).view({-1, features});
}

void print_row(const torch::Tensor& row) {
  const auto numbers = row.to(torch::kCPU, torch::kFloat).contiguous().flatten();
  std::string line;
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof digits, numbers.data_ptr<float>()[i]);
    if (i > 0) line += ',';
    line.append(digits, end.ptr);
  }
  std::puts(line.c_str());
}

// Returns an error's message without the backtrace that torch adds.
std::string reason_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs == nullptr ? error.what() : torchs->what_without_backtrace();
}

void print_error(const std::exception& error) {
  std::string reason = reason_of(error);
  std::replace(reason.begin(), reason.end(), '\n', ' ');  // one line of output per line of input
  std::printf("error: %s\n", reason.c_str());
}

// The package sets F: a model that is given another computes nonsense without a word.
int64_t features_of(const std::unordered_map<std::string, std::string>& metadata) {
  const auto found = metadata.find("features");
  TORCH_CHECK(found != metadata.end(),
              "the package's metadata must hold \"features\", the size of the model's last input "
              "axis; give aoti_compile_and_package inductor_configs="
              "{\"aot_inductor.metadata\": {\"features\": \"...\"}}");
  const int64_t features = std::stoll(found->second);
  TORCH_CHECK(features > 0, "\"features\" in the package's metadata must be positive, got ",
              features);
  return features;
}

class Server {
 public:
  Server(const std::string& package, size_t largest_batch)
      : model_(package),
        device_(model_.get_metadata().at("AOTI_DEVICE_KEY")),
        features_(features_of(model_.get_metadata())),
        largest_batch_(largest_batch) {}

  void serve(int file) {
    Lines lines(file);
    while (const auto line = lines.next()) {
      add(*line);
      if (batch_.size() == largest_batch_ || !lines.is_ready()) answer();
      std::fflush(stdout);
    }
    answer();
  }

 private:
  void add(const std::string& line) {
    try {
      const auto sequence = parse_sequence(line, features_);
      if (!batch_.empty() && batch_[0].size(0) != sequence.size(0)) answer();
      batch_.push_back(sequence);
    } catch (const std::exception& error) {
      answer();  // those before it come first
      print_error(error);
    }
  }

  void answer() {
    if (batch_.empty()) return;
    try {
      const c10::InferenceMode no_gradients;
      const auto output = model_.run({torch::stack(batch_).to(device_)}).at(0);
      for (const auto& row : output.unbind(0)) print_row(row);
    } catch (const std::exception& error) {
      for (size_t i = 0; i < batch_.size(); ++i) print_error(error);
    }
    batch_.clear();
  }

  torch::inductor::AOTIModelPackageLoader model_;
  torch::Device device_;
  int64_t features_;
  size_t largest_batch_;
  std::vector<torch::Tensor> batch_;  // each [L, F]
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 2 || count > 3) {
    std::fprintf(stderr, "usage: serve model.pt2 [largest batch]\n");
    return 2;
  }
  try {
    const int64_t largest_batch = count == 3 ? parse_largest_batch(arguments[2]) : 64;
    Server(arguments[1], static_cast<size_t>(largest_batch)).serve(STDIN_FILENO);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve: %s\n", reason_of(error).c_str());
    return 1;
  }
  return 0;
}
