"""The round: propose, exchange, vote, commit or discard; replica and coordinator, without Ray and without a clock."""
