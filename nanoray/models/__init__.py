"""The GPT, the mixture of experts and the ResNet; precision and costs."""
