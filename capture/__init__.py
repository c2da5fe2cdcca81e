"""Stage one, a verb: conversations -> samples -> plan -> target forward -> shards; and the target's answers."""
