// Learns a noisy sine with one layer of implicit-kernel attention, in C++ alone.
//
// The sequence is read as a time series: each of its L points attends to all others, by its time
// and noisy value. Exits with 0 when the loss has fallen at least tenfold and gradients reached the
// frequencies.
#include <ikattn/attention.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

namespace {

constexpr int64_t kHeads = 4;
constexpr int64_t kHeadSize = 8;
constexpr int64_t kFrequencies = 16;
constexpr int64_t kWidth = kHeads * kHeadSize;

struct RegressorImpl : torch::nn::Module {
  RegressorImpl() {
    project_in = register_module("project_in", torch::nn::Linear(2, 3 * kWidth));
    project_out = register_module("project_out", torch::nn::Linear(kWidth, 1));
    const double bound = 1.0 / std::sqrt(static_cast<double>(kHeads * kFrequencies));
    const auto frequencies = [bound] {
      return torch::empty({kHeads, kHeadSize, kFrequencies}).uniform_(-bound, bound);
    };
    w1 = register_parameter("w1", frequencies());
    w2 = register_parameter("w2", frequencies());
  }

  // x [B, L, 2] -> [B, L, 1]
  torch::Tensor forward(const torch::Tensor& x) {
    // [B, L, 3, H, d] -> 3 x [B, H, L, d]
    const auto projected =
        project_in(x).unflatten(-1, {3, kHeads, kHeadSize}).permute({2, 0, 3, 1, 4});
    const auto attended =
        ikattn::implicit_kernel_attention(projected[0], projected[1], projected[2], w1, w2);
    return project_out(attended.transpose(1, 2).flatten(2));
  }

  torch::nn::Linear project_in{nullptr}, project_out{nullptr};
  torch::Tensor w1, w2;  // [H, d, M]
};
TORCH_MODULE(Regressor);

}  // namespace

int main() {
  torch::manual_seed(0);
  constexpr int64_t kLength = 128;
  const auto time = torch::linspace(-1, 1, kLength);
  const auto target = torch::sin(2 * M_PI * time).view({1, kLength, 1});
  const auto noisy = target + 0.1 * torch::randn_like(target);
  const auto x = torch::cat({time.view({1, kLength, 1}), noisy}, -1);

  Regressor model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  double first_loss = 0, last_loss = 0;
  constexpr int kSteps = 200;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model(x), target);
    loss.backward();
    optimizer.step();
    last_loss = loss.item<double>();
    if (step == 0) first_loss = last_loss;
  }

  const double gradient =
      model->w1.grad().norm().item<double>() + model->w2.grad().norm().item<double>();
  std::printf("loss %.5f -> %.5f in %d steps, gradient norm of the frequencies %.3g\n", first_loss,
              last_loss, kSteps, gradient);
  return last_loss < first_loss / 10 && gradient > 0 ? 0 : 1;
}
