"""A recipe's models: actor and critic as one, built, warm-started, restored and exported."""
