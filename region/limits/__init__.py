"""What may be used: quotas of tenants and identities, and budgets of memory."""
