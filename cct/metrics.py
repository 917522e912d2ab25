EXPLAINED = ("baseline/explained_variance", "critic/explained_variance")  # the first that there is, as the transport read it
